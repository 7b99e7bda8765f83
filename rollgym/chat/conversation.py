"""One episode's conversation: ids in, ids out, and the rows to train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollgym.chat.codec import MIDDLE
from rollgym.chat.facts import Message, difference
from rollgym.chat.template import ChatTemplate, Rendered
from rollgym.errors import UsageError
from rollgym.records import clean_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence to train on."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    """1 where the policy sampled the id, 0 where the environment or the template wrote it."""
    logprobs: tuple[float, ...]
    """As sampled; 0 where the mask is. Empty where a reply came without."""


@dataclass(slots=True)
class _Open:
    """A row while it grows."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    known: bool = True
    """Whether all replies so far came with log-probs."""
    spoken: int = 0
    """Where the last reply ended; 0 before the first."""

    def write(self, ids: Sequence[int]) -> None:
        self._add(ids, 0, [0.0] * len(ids))

    def sample(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.known = self.known and len(logprobs) == len(ids)
        self._add(ids, 1, logprobs if len(logprobs) == len(ids) else [0.0] * len(ids))
        self.spoken = len(self.ids)

    def _add(self, ids: Sequence[int], mask: int, logprobs: Sequence[float]) -> None:
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs

    def cut(self, length: int) -> None:
        for part in (self.ids, self.mask, self.logprobs):
            del part[length:]

    def closed(self) -> Row:
        """The row up to its last reply."""
        end = self.spoken
        return Row(
            ids=tuple(self.ids[:end]),
            mask=tuple(self.mask[:end]),
            logprobs=tuple(self.logprobs[:end]) if self.known else (),
        )


class Conversation:
    """Observations and replies by turns, as token ids.

    A row grows as long as the template leaves the past alone. Where it does not, a new row begins with all
    of the conversation written anew.
    """

    def __init__(
        self, template: ChatTemplate, system: str = "", past: Sequence[tuple[str, str]] = ()
    ) -> None:
        """``past`` are observations and replies that went before, told anew as text."""
        self.template = template
        self._system = clean_text(system)
        self._messages: list[Message] = []
        for observation, reply in past:
            self._add_message(clean_text(observation))
            self._messages.append({"role": "assistant", "content": reply})
        self._undo = (0, 0, "")
        """Rows, ids of the last and its text, before the last observation."""
        self._rows: list[_Open] = []
        self._shown = ""
        """The text of the row when the last reply was asked for."""
        self._said = ""
        """The text of the last reply, without the token that ended it."""
        self._end: int | None = None
        """The token that ended it; ``None`` where it was cut off."""
        self._asked = False

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """What ends a reply."""
        return self.template.facts.stop_ids

    @property
    def said(self) -> str:
        """The last reply as it stands in the history."""
        return self._messages[-1]["content"]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The whole row so far: what the engine is sent."""
        return tuple(self._rows[-1].ids) if self._rows else ()

    @property
    def added_ids(self) -> tuple[int, ...]:
        """What was written since the last reply in this row: all of it, in a new one."""
        return tuple(self._rows[-1].ids[self._rows[-1].spoken :]) if self._rows else ()

    @property
    def new_row(self) -> bool:
        """True where the last observation began a row because the template changed the past."""
        return len(self._rows) > 1 and not self._rows[-1].spoken

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows to train on: each ends with its last reply, and holds something that was sampled."""
        return tuple(row.closed() for row in self._rows if any(row.mask))

    def observe(self, text: str) -> None:
        """The environment speaks: what it says is in `prompt_ids` afterwards."""
        if self._asked:
            raise UsageError("A conversation goes by turns: reply() comes before the next observe().")
        self._undo = len(self._rows), len(self.prompt_ids), self._shown
        told = len(self._messages)
        self._add_message(clean_text(text))
        if not told:
            self._shown, ids = self.template.opening(self._messages)
            self._rows.append(_Open())
            self._rows[-1].write(ids)
        else:
            rendered = self.template.render(self._messages)
            place = self._continues(rendered.text) if self._rows else None
            if place is None:
                self._rows.append(_Open())
            self._write(rendered, *(place or (0, "")))
            self._shown = rendered.text
        self._asked = True

    def take_back(self) -> None:
        """Undo the last `observe`, which was not replied to."""
        if not self._asked:
            raise UsageError("There is no observation to take back: reply() has followed it.")
        count, length, self._shown = self._undo
        del self._rows[count:]
        if self._rows:
            self._rows[-1].cut(length)
        self._messages.pop()
        if [message["role"] for message in self._messages] == ["system"]:
            self._messages.clear()
        self._asked = False

    def reply(self, token_ids: Sequence[int], logprobs: Sequence[float] = ()) -> str:
        """The policy speaks: its ids are kept as they are. Returns their text, without special tokens."""
        if not self._asked:
            raise UsageError("A conversation goes by turns: observe() comes before reply().")
        if logprobs and len(logprobs) != len(token_ids):
            raise UsageError(f"{len(token_ids)} token ids but {len(logprobs)} log-probs.")
        codec, ids = self.template.codec, [int(number) for number in token_ids]
        row = self._rows[-1]
        ended = bool(ids) and ids[-1] in self.stop_ids
        self._end = ids[-1] if ended else None
        spoken = ids[:-1] if ended else ids
        self._said = codec.decode(spoken, after=row.ids[-1] if row.ids else None)
        row.sample(ids, logprobs)
        facts = self.template.facts
        content = self._said.removeprefix(facts.lead).removesuffix(facts.tail)
        self._messages.append({"role": "assistant", "content": content})
        self._asked = False
        return codec.decode(spoken, special=False)

    def _add_message(self, text: str) -> None:
        if not self._messages and self._system:
            if self.template.facts.system_role:
                self._messages.append({"role": "system", "content": self._system})
            else:
                text = f"{self._system}\n\n{text}"
        self._messages.append({"role": "user", "content": text})

    def _write(self, rendered: Rendered, start: int, before: str) -> None:
        ids = self.template.encode(self._messages, rendered, start=start, before=before)
        self._rows[-1].write(ids)

    def _continues(self, text: str) -> tuple[int, str] | None:
        """Where the new part of the text starts and what it follows; ``None`` where the past changed."""
        past = self._shown + self._said
        if not text.startswith(past):
            self._check_repeats()
            return None
        if self._end is not None:
            token = self.template.codec.decode([self._end])
            if text.startswith(token, len(past)):
                return len(past) + len(token), token
            if self._end == self.template.facts.end_of_turn_id:
                return None
        return len(past), MIDDLE

    def _check_repeats(self) -> None:
        """The past may be written differently when the talk goes on, but not for no reason at all."""
        again = self.template.render(self._messages[:-2]).text
        if again != self._shown:
            raise UsageError(
                "The chat template does not write the same text twice for the same messages "
                f"({difference(self._shown, again)})."
            )
