"""A chat template, put to use safely: only the template writes control tokens.

Where a message holds the text of a control token, the text is cut inside it before it is tokenised, so that
it stays text. To find the place again after the template has trimmed or moved the message, the cut is marked
with a character that occurs nowhere else.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.chat.clock import read_date, stop_clock
from rollgym.chat.codec import Codec
from rollgym.chat.facts import Facts, Message, examine
from rollgym.chat.tokenizer import Tokenizer
from rollgym.errors import UsageError, one_line

_MARKS = range(0xF0000, 0xFFFFE)
"""Characters for private use: text hardly ever holds one, and never all."""
_HARMLESS = "x"
_OPENINGS = 8192
"""So many first observations are remembered: members of a group, and turns told one by one, share them."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and where tokenising must start anew."""

    text: str
    cuts: tuple[int, ...] = ()

    def pieces(self, start: int) -> list[str]:
        """The text from ``start`` on, cut."""
        edges = [start, *(cut for cut in self.cuts if cut > start), len(self.text)]
        return [self.text[a:b] for a, b in zip(edges, edges[1:], strict=False) if a < b]


class ChatTemplate:
    """A tokenizer with its chat template, tried out once; a `UsageError` says why it cannot be used.

    ``kwargs`` go to the template (``{"enable_thinking": False}``); ``date`` (YYYY-MM-DD) is what a template
    that writes today's date is told.
    """

    def __init__(
        self, tokenizer: Tokenizer, kwargs: Mapping[str, Any] | None = None, *, date: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        self._now = read_date(date)
        self.codec = Codec(tokenizer)
        self.facts: Facts = examine(self.apply, self.codec)
        added = self.codec.added
        self.controls = {
            token: number
            for token, number in added.items()
            if token in self.codec.special or (token.strip() and token in self.facts.written)
        }
        """The tokens that only the template may write: special ones, and others that it does write."""
        self._control_ids = frozenset(self.controls.values()) - self.codec.unknown
        self._remembered = functools.lru_cache(_OPENINGS)(self._open)
        self._control_starts = _starts(self.controls)
        self._special_starts = _starts(self.codec.special)

    def apply(
        self, messages: Sequence[Message], *, generation: bool = True, now: datetime.datetime | None = None
    ) -> str:
        """The messages as the template writes them, at the time ``now`` if no date was given."""
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation,
                **self._kwargs | self._at(self._now or now),
            )
        except Exception as error:
            if getattr(self._tokenizer, "chat_template", "") is None:
                raise UsageError("The tokenizer has no chat template: it holds no conversations.") from None
            roles = ", ".join(message["role"] for message in messages)
            raise UsageError(f"The chat template refuses the messages {roles}: {one_line(error)}.") from error
        return str(text)

    def _at(self, now: datetime.datetime | None) -> dict[str, str]:
        source = self._kwargs.get("chat_template", getattr(self._tokenizer, "chat_template", None))
        if isinstance(source, dict):
            source = source.get("default")
        return {"chat_template": stop_clock(source, now)} if now and isinstance(source, str) else {}

    def render(self, messages: Sequence[Message], *, hard: bool = False, replies: bool = False) -> Rendered:
        """The messages as text with cuts inside whatever looks like a control token.

        ``hard`` cuts what was observed at every character, ``replies`` cuts earlier replies too.
        """
        contents = "".join(message["content"] for message in messages)
        mark = next((chr(c) for c in _MARKS if chr(c) not in contents), None)
        if mark is None:
            raise UsageError("An observation holds every character for private use: it cannot be marked.")
        marked = [{**message, "content": self._mark(message, mark, hard, replies)} for message in messages]
        pieces = self.apply(marked).split(mark)
        cuts: list[int] = []
        place = 0
        for piece in pieces[:-1]:
            place += len(piece)
            cuts.append(place)
        return Rendered("".join(pieces), tuple(cuts))

    def opening(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """A conversation without replies as text and as ids; remembered, since many begin alike."""
        return self._remembered(tuple((message["role"], message["content"]) for message in messages))

    def _open(self, told: tuple[tuple[str, str], ...]) -> tuple[str, tuple[int, ...]]:
        messages: list[Message] = [{"role": role, "content": content} for role, content in told]
        rendered = self.render(messages)
        return rendered.text, tuple(self.encode(messages, rendered))

    def encode(
        self, messages: Sequence[Message], rendered: Rendered, *, start: int = 0, before: str = ""
    ) -> list[int]:
        """The ids of what is rendered from ``start`` on, with no control token but the template's own.

        At ``start`` 0 that is the whole conversation, else its last message.
        """
        # A template that looks for special tokens in replies must see them whole.
        spoken = not start and any(message["role"] == "assistant" for message in messages)
        replies = spoken and self.render(messages, replies=True).text == rendered.text
        harmless = self._harmless(messages, only_last=start > 0)
        plain = self.render(harmless, replies=replies)
        wanted = self._controls_in(self.codec.encode(plain.pieces(start), before))
        found: list[int] = []
        for hard in (False, True):
            again = self.render(messages, hard=hard, replies=replies) if hard or replies else rendered
            ids = self.codec.encode(again.pieces(start), before)
            found = self._controls_in(ids)
            if again.text == rendered.text and found == wanted:
                return ids
        names = {number: token for token, number in self.controls.items()}
        raise UsageError(
            "An observation becomes control tokens that the chat template did not write: expected "
            f"{[names[i] for i in wanted]}, found {[names[i] for i in found]}."
        )

    def _controls_in(self, ids: list[int]) -> list[int]:
        return [number for number in ids if number in self._control_ids]

    def _mark(self, message: Message, mark: str, hard: bool, replies: bool) -> str:
        content = message["content"]
        if message["role"] == "assistant":
            # The template may look for tags in replies, so only special tokens are cut, and only on demand.
            return self._special_starts.sub(rf"\1{mark}", content) if replies else content
        if hard:
            core = content.strip()
            return content.replace(core, mark + mark.join(core) + mark, 1) if core else content
        return self._control_starts.sub(rf"\1{mark}", content)

    def _harmless(self, messages: Sequence[Message], only_last: bool) -> list[Message]:
        """The same conversation with nothing in it that could be taken for a control token."""
        first = len(messages) - 1 if only_last else 0
        return [
            {**message, "content": _HARMLESS}
            if place >= first and message["role"] != "assistant" and message["content"].strip()
            else message
            for place, message in enumerate(messages)
        ]


def _starts(tokens: Sequence[str] | frozenset[str] | dict[str, int]) -> re.Pattern[str]:
    """Finds the first character of each of these, wherever one begins."""
    longer = [re.escape(token) for token in tokens if len(token) > 1]
    return re.compile(f"(?=(?:{'|'.join(longer)}))(.)" if longer else "(?!)()", re.DOTALL)
