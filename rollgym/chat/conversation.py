"""One episode's conversation as token ids: what to send to an engine, and what each turn adds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollgym.chat.template import ChatTemplate, Rendered
from rollgym.chat.template_probe import Message, difference
from rollgym.chat.tokenizer import MIDDLE
from rollgym.core.errors import UsageError
from rollgym.core.serialization import clean_text


@dataclass(slots=True)
class _Row:
    """A token sequence that grows turn by turn."""

    ids: list[int] = field(default_factory=list)
    reply_end: int = 0
    """Where the last reply ends; 0 before the first."""


class Conversation:
    """Observations and replies in alternation, as token ids.

    A row grows as long as the template leaves earlier messages unchanged. Where it rewrites them, a new row
    starts with the whole conversation rendered again.

    Args:
        template: Renders and encodes messages.
        system: System message; empty for none.
        history: Earlier (observation, reply) pairs, rendered as text.
    """

    def __init__(
        self, template: ChatTemplate, system: str = "", history: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.template = template
        self._system = clean_text(system)
        self._messages: list[Message] = []
        for observation, reply in history:
            self._add_user_message(clean_text(observation))
            self._messages.append({"role": "assistant", "content": reply})
        self._undo = (0, 0, "")
        """Number of rows, length of the last one and its text, before the last observation."""
        self._rows: list[_Row] = []
        self._prompt_text = ""
        """The rendered row when the last reply was requested."""
        self._reply_text = ""
        """The last reply without the token that ended it."""
        self._end_id: int | None = None
        """The token that ended the last reply; ``None`` where it was cut off."""
        self._awaits_reply = False

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a reply."""
        return self.template.facts.stop_ids

    @property
    def last_reply(self) -> str:
        """The last reply as it stands in the history."""
        return self._messages[-1]["content"]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The whole row so far, to be sent to the engine."""
        return tuple(self._rows[-1].ids) if self._rows else ()

    @property
    def added_ids(self) -> tuple[int, ...]:
        """The ids after the last reply in this row: all of them in a new row."""
        return tuple(self._rows[-1].ids[self._rows[-1].reply_end :]) if self._rows else ()

    @property
    def new_row(self) -> bool:
        """Whether the last observation started a new row because the template changed earlier messages."""
        return len(self._rows) > 1 and not self._rows[-1].reply_end

    def observe(self, text: str) -> None:
        """Add an observation to `prompt_ids`."""
        if self._awaits_reply:
            raise UsageError("Observations and replies alternate: call reply() before the next observe().")
        self._undo = len(self._rows), len(self.prompt_ids), self._prompt_text
        is_first = not self._messages
        self._add_user_message(clean_text(text))
        if is_first:
            self._prompt_text, ids = self.template.opening(self._messages)
            self._rows.append(_Row(list(ids)))
        else:
            rendered = self.template.render(self._messages)
            continuation = self._continuation(rendered.text) if self._rows else None
            if continuation is None:
                self._rows.append(_Row())
            self._write(rendered, *(continuation or (0, "")))
        self._awaits_reply = True

    def undo_observe(self) -> None:
        """Remove the last observation, which has no reply yet."""
        if not self._awaits_reply:
            raise UsageError("No observation to undo: a reply has followed it.")
        num_rows, length, self._prompt_text = self._undo
        del self._rows[num_rows:]
        if self._rows:
            del self._rows[-1].ids[length:]
        self._messages.pop()
        if [message["role"] for message in self._messages] == ["system"]:
            self._messages.clear()
        self._awaits_reply = False

    def reply(self, token_ids: Sequence[int]) -> str:
        """Add the sampled ids, unchanged, and return their text without special tokens."""
        if not self._awaits_reply:
            raise UsageError("Observations and replies alternate: call observe() before reply().")
        codec, ids = self.template.codec, [int(number) for number in token_ids]
        row = self._rows[-1]
        ended = bool(ids) and ids[-1] in self.stop_ids
        self._end_id = ids[-1] if ended else None
        text_ids = ids[:-1] if ended else ids
        self._reply_text = codec.decode(text_ids, after=row.ids[-1] if row.ids else None)
        row.ids += ids
        row.reply_end = len(row.ids)
        facts = self.template.facts
        content = self._reply_text.removeprefix(facts.lead).removesuffix(facts.tail)
        self._messages.append({"role": "assistant", "content": content})
        self._awaits_reply = False
        return codec.decode(text_ids, special=False)

    def _add_user_message(self, text: str) -> None:
        if not self._messages and self._system:
            if self.template.facts.system_role:
                self._messages.append({"role": "system", "content": self._system})
            else:
                text = f"{self._system}\n\n{text}"
        self._messages.append({"role": "user", "content": text})

    def _write(self, rendered: Rendered, start: int, before: str) -> None:
        """Append what is rendered from ``start`` on to the last row."""
        self._rows[-1].ids += self.template.encode(self._messages, rendered, start=start, before=before)
        self._prompt_text = rendered.text

    def _continuation(self, text: str) -> tuple[int, str] | None:
        """Return where the new text starts and what it follows; ``None`` where earlier messages changed."""
        past = self._prompt_text + self._reply_text
        if not text.startswith(past):
            self._check_deterministic()
            return None
        if self._end_id is not None:
            token = self.template.codec.decode([self._end_id])
            if text.startswith(token, len(past)):
                return len(past) + len(token), token
            if self._end_id == self.template.facts.end_of_turn_id:
                return None
        return len(past), MIDDLE

    def _check_deterministic(self) -> None:
        """Check that the template changed earlier messages because of the new ones, not at random."""
        again = self.template.render(self._messages[:-2]).text
        if again != self._prompt_text:
            raise UsageError(
                "The chat template does not write the same text twice for the same messages "
                f"({difference(self._prompt_text, again)})."
            )


class BranchingConversation(Conversation):
    """A `Conversation` that can be forked and can start in the middle, for clients that send all messages."""

    @classmethod
    def begin(cls, template: ChatTemplate, system: str, messages: Sequence[Message]) -> BranchingConversation:
        """Return a conversation with one row that holds all messages; the last one is the user's."""
        conversation = cls(template, system)
        first, *rest = messages
        if first["role"] == "user":
            conversation._add_user_message(first["content"])
        else:
            if system and template.facts.system_role:
                conversation._messages.append({"role": "system", "content": system})
            conversation._messages.append(dict(first))
        conversation._messages += [dict(message) for message in rest]
        # Not `opening`: that caches what it renders, and here hardly anything occurs twice.
        conversation._rows.append(_Row())
        conversation._write(template.render(conversation._messages), 0, "")
        conversation._awaits_reply = True
        return conversation

    def fork(self) -> BranchingConversation:
        """Return an independent copy."""
        other = copy.copy(self)
        row = self._rows[-1]
        other._messages, other._rows = list(self._messages), [_Row([*row.ids], row.reply_end)]
        return other
