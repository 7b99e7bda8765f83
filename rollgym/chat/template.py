"""Rendering and encoding with a chat template, in which only the template writes control tokens.

The text of a control token in a message is split before tokenizing, so that it stays text. To find the
position again after the template has trimmed or moved the message, the split is marked with a character that
occurs nowhere else.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.chat.template_probe import Message, TemplateFacts, probe_template
from rollgym.chat.tokenizer import MIDDLE, Codec, Tokenizer
from rollgym.core.errors import UsageError, one_line
from rollgym.core.serialization import clean_text

NO_TEMPLATE = (
    "The tokenizer has no chat template, which says how a conversation becomes tokens. Use an "
    "instruction-tuned model, or put its family's template into the model folder as chat_template.jinja."
)
_LETTERS = "eaAbBcdfHIjmMpSuUwWxXyYzZ"
_DIRECTIVES = ["%-d", "%-m", "%-H", "%-I", *(f"%{letter}" for letter in _LETTERS)]


def read_date(date: str | None) -> datetime.datetime | None:
    """Return the start of a day given as YYYY-MM-DD."""
    if date is None:
        return None
    try:
        return datetime.datetime.combine(datetime.date.fromisoformat(date), datetime.time())
    except (TypeError, ValueError):
        raise UsageError(f"date must be a day such as 2025-01-31, not {date!r}.") from None


def freeze_date(template: str, now: datetime.datetime) -> str:
    """Return the source of a template for which the time is always ``now``."""
    pairs = [(json.dumps(directive), json.dumps(now.strftime(directive))) for directive in _DIRECTIVES]
    steps = "".join(f".replace({directive}, {value})" for directive, value in pairs)
    # The plus keeps a newline with which the template may start.
    return f"{{% macro strftime_now(form) -%}}{{{{- form{steps} -}}}}{{%- endmacro +%}}{template}"


_MARKS = range(0xF0000, 0xFFFFE)
"""Private-use characters: texts rarely contain one, and never all."""
_HARMLESS = "x"
_OPENINGS = 8192
"""Cached first prompts: shared by the episodes of a group, and by turns without history."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and the positions at which it is split for tokenizing."""

    text: str
    cuts: tuple[int, ...] = ()

    def pieces(self, start: int) -> list[str]:
        """Return the text from ``start`` on, split."""
        edges = [start, *(cut for cut in self.cuts if cut > start), len(self.text)]
        return [self.text[a:b] for a, b in zip(edges, edges[1:], strict=False) if a < b]


class ChatTemplate:
    """A tokenizer with its chat template, probed once.

    Args:
        tokenizer: A transformers tokenizer, or any `Tokenizer`.
        kwargs: Variables of the template, such as ``{"enable_thinking": False}``.
        date: Date (YYYY-MM-DD) for a template that writes today's date.

    Raises:
        UsageError: The template cannot be used to continue conversations.
    """

    def __init__(
        self, tokenizer: Tokenizer, kwargs: Mapping[str, Any] | None = None, *, date: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        self._now = read_date(date)
        self.codec = Codec(tokenizer)
        self.facts: TemplateFacts = probe_template(self.apply, self.codec)
        added = self.codec.added
        self.controls = {
            token: number
            for token, number in added.items()
            if token in self.codec.special or (token.strip() and token in self.facts.written)
        }
        """The tokens that only the template may write: special ones, and other added ones that it writes."""
        self._control_ids = frozenset(self.controls.values()) - self.codec.unknown
        self._cached_opening = functools.lru_cache(_OPENINGS)(self._open)
        self._control_starts = _starts(self.controls)
        self._special_starts = _starts(self.codec.special)

    def apply(
        self, messages: Sequence[Message], *, generation: bool = True, now: datetime.datetime | None = None
    ) -> str:
        """Render messages with the template, at the time ``now`` unless a date is set."""
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation,
                **self._kwargs | self._at(self._now or now),
            )
        except Exception as error:
            if getattr(self._tokenizer, "chat_template", "") is None:
                raise UsageError(NO_TEMPLATE) from None
            roles = ", ".join(message["role"] for message in messages)
            raise UsageError(f"The chat template refuses the messages {roles}: {one_line(error)}.") from error
        return str(text)

    def _at(self, now: datetime.datetime | None) -> dict[str, str]:
        source = self._kwargs.get("chat_template", getattr(self._tokenizer, "chat_template", None))
        if isinstance(source, dict):
            source = source.get("default")
        return {"chat_template": freeze_date(source, now)} if now and isinstance(source, str) else {}

    def render(self, messages: Sequence[Message], *, hard: bool = False, replies: bool = False) -> Rendered:
        """Render messages, split inside everything that looks like a control token.

        ``hard`` splits observations at every character, ``replies`` also splits earlier replies.
        """
        contents = "".join(message["content"] for message in messages)
        mark = next((chr(c) for c in _MARKS if chr(c) not in contents), None)
        if mark is None:
            raise UsageError("An observation contains every private-use character: it cannot be marked.")
        marked = [{**message, "content": self._mark(message, mark, hard, replies)} for message in messages]
        pieces = self.apply(marked).split(mark)
        cuts: list[int] = []
        position = 0
        for piece in pieces[:-1]:
            position += len(piece)
            cuts.append(position)
        return Rendered("".join(pieces), tuple(cuts))

    def opening(self, messages: Sequence[Message]) -> tuple[str, tuple[int, ...]]:
        """Return a conversation without replies as text and ids, cached because many episodes share it."""
        return self._cached_opening(tuple((message["role"], message["content"]) for message in messages))

    def _open(self, contents: tuple[tuple[str, str], ...]) -> tuple[str, tuple[int, ...]]:
        messages: list[Message] = [{"role": role, "content": content} for role, content in contents]
        rendered = self.render(messages)
        return rendered.text, tuple(self.encode(messages, rendered))

    def encode(
        self, messages: Sequence[Message], rendered: Rendered, *, start: int = 0, before: str = ""
    ) -> list[int]:
        """Return the ids of the rendered text from ``start`` on, with the template's control tokens only.

        From ``start`` 0 that is the whole conversation, otherwise its last message.
        """
        # A template that looks for special tokens in replies must see them whole.
        has_replies = not start and any(message["role"] == "assistant" for message in messages)
        replies = has_replies and self.render(messages, replies=True).text == rendered.text
        harmless = self._harmless(messages, only_last=start > 0)
        plain = self.render(harmless, replies=replies)
        expected = self._controls_in(self.codec.encode(plain.pieces(start), before))
        controls: list[int] = []
        for hard in (False, True):
            again = self.render(messages, hard=hard, replies=replies) if hard or replies else rendered
            ids = self.codec.encode(again.pieces(start), before)
            controls = self._controls_in(ids)
            if again.text == rendered.text and controls == expected:
                return ids
        names = {number: token for token, number in self.controls.items()}
        raise UsageError(
            "An observation becomes control tokens that the chat template did not write: expected "
            f"{[names[i] for i in expected]}, found {[names[i] for i in controls]}."
        )

    def encode_reply(self, text: str) -> tuple[int, ...]:
        """Return a reply as the ids that a model would have to sample, including the end of its turn.

        Raises:
            UsageError: No token ends a reply, or the text contains such a token.
        """
        stop_ids = self.facts.stop_ids
        if not stop_ids:
            raise UsageError("The tokenizer has no end-of-turn token and no end-of-text token.")
        ids = self.codec.encode([clean_text(text)], before=MIDDLE)
        if any(number in stop_ids for number in ids):
            raise UsageError("The text of a reply contains a token that ends replies.")
        return (*ids, stop_ids[0])

    def _controls_in(self, ids: list[int]) -> list[int]:
        return [number for number in ids if number in self._control_ids]

    def _mark(self, message: Message, mark: str, hard: bool, replies: bool) -> str:
        content = message["content"]
        if message["role"] == "assistant":
            # The template may look for tags in replies, so only special tokens are split, and only if asked.
            return self._special_starts.sub(rf"\1{mark}", content) if replies else content
        if hard:
            core = content.strip()
            return content.replace(core, mark + mark.join(core) + mark, 1) if core else content
        return self._control_starts.sub(rf"\1{mark}", content)

    def _harmless(self, messages: Sequence[Message], only_last: bool) -> list[Message]:
        """Return the same conversation without anything that could be read as a control token."""
        first = len(messages) - 1 if only_last else 0
        return [
            {**message, "content": _HARMLESS}
            if index >= first and message["role"] != "assistant" and message["content"].strip()
            else message
            for index, message in enumerate(messages)
        ]


def _starts(tokens: Sequence[str] | frozenset[str] | dict[str, int]) -> re.Pattern[str]:
    """Return a pattern of the first character of each of these tokens."""
    longer = [re.escape(token) for token in tokens if len(token) > 1]
    return re.compile(f"(?=(?:{'|'.join(longer)}))(.)" if longer else "(?!)()", re.DOTALL)
