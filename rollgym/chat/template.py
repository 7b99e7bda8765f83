"""Rendering and encoding with a chat template, in which only the template writes control tokens.

The text of a control token in a message or a tool is split before tokenizing, so that it stays text. To find
the position again after the template has trimmed or moved the message, the split is marked with a character
that occurs nowhere else.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollgym.chat.bounded_cache import BoundedCache
from rollgym.chat.template_probe import TemplateFacts, TemplateMessage, probe_template
from rollgym.chat.tokenizer import MIDDLE, Codec, Tokenizer
from rollgym.chat.tool_formats import opens_reasoning
from rollgym.chat.tool_probe import AUTO, ToolFacts, probe_tools, template_call
from rollgym.core.errors import UsageError, one_line
from rollgym.core.messages import ToolCall, ToolSpec
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
Tools = Mapping[str, Any]
"""Variables of a template that hold tools."""
REASONING_KEYS = ("reasoning_content", "thinking")
"""Keys of a message under which templates look for reasoning."""
_OPENINGS_BYTES = 256_000_000
"""Approximate bytes of cached first prompts: shared by the episodes of a group, and by turns without
history."""
_OPENING_BYTES, _ID_BYTES = 1_000, 40
"""Approximate bytes of a cached prompt beside its text, and of a token id in a tuple."""
_FORCED = 256
"""Cached starts of calls, by the tools that may be called."""
_ARGUMENTS: tuple[dict[str, Any], ...] = ({}, {"a": "b"}, {"z": [1]})
"""Arguments of calls whose common start is that of every call."""


def _opening_bytes(opening: tuple[str, tuple[int, ...]]) -> int:
    # The key has the text a second time.
    text, ids = opening
    return _OPENING_BYTES + 2 * len(text) + _ID_BYTES * len(ids)


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
        tool_format: Form of tool calls (`rollgym.chat.tool_formats`); ``auto`` for the template's own.

    Raises:
        UsageError: The template cannot be used to continue conversations.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        kwargs: Mapping[str, Any] | None = None,
        *,
        date: str | None = None,
        tool_format: str = AUTO,
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        self._now = read_date(date)
        self.codec = Codec(tokenizer)
        self.facts: TemplateFacts = probe_template(self.apply, self.codec)
        self.tools: ToolFacts = probe_tools(self.apply, self.codec, self.facts, tool_format)
        self.opens_reasoning = opens_reasoning(self.facts.generation_prompt)
        """True where a reply continues reasoning that the generation prompt has opened."""
        added = self.codec.added
        written = f"{self.facts.written}\0{self.tools.written}"
        self.controls = {
            token: number
            for token, number in added.items()
            if token in self.codec.special or (token.strip() and token in written)
        }
        """The tokens that only the template may write: special ones, and other added ones that it writes."""
        self._control_ids = frozenset(self.controls.values()) - self.codec.unknown
        self._openings = BoundedCache[tuple[str, tuple[int, ...]]](_OPENINGS_BYTES, _opening_bytes)
        self._cached_forced = functools.lru_cache(_FORCED)(self._forced)
        self._control_starts = _starts(self.controls)
        self._special_starts = _starts(self.codec.special)

    def tool_variables(self, tools: Sequence[ToolSpec]) -> Tools:
        """Return the template's variables for tools: none where the system message describes them."""
        if not tools or not self.tools.native:
            return {}
        return {self.tools.variable: [spec.to_openai() for spec in tools]}

    def apply(
        self,
        messages: Sequence[TemplateMessage],
        *,
        generation: bool = True,
        now: datetime.datetime | None = None,
        tools: Tools | None = None,
    ) -> str:
        """Render messages with the template, at the time ``now`` unless a date is set."""
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation,
                **self._kwargs | self._at(self._now or now) | dict(tools or {}),
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

    def render(
        self,
        messages: Sequence[TemplateMessage],
        tools: Tools | None = None,
        *,
        hard: bool = False,
        replies: bool = False,
    ) -> Rendered:
        """Render messages, split inside everything that looks like a control token.

        ``hard`` splits observations at every character, ``replies`` also splits earlier replies.
        """
        contents = _all_text(messages, tools)
        mark = next((chr(c) for c in _MARKS if not any(form in contents for form in _forms(chr(c)))), None)
        if mark is None:
            raise UsageError("An observation contains every private-use character: it cannot be marked.")
        marked = [self._mark(message, mark, hard, replies) for message in messages]
        text = self.apply(marked, tools=self._mark_value(tools, mark, hard))
        if tools:
            for form in _forms(mark):
                text = text.replace(form, mark)
        pieces = text.split(mark)
        cuts: list[int] = []
        position = 0
        for piece in pieces[:-1]:
            position += len(piece)
            cuts.append(position)
        return Rendered("".join(pieces), tuple(cuts))

    def opening(
        self, messages: Sequence[TemplateMessage], tools: Tools | None = None
    ) -> tuple[str, tuple[int, ...]]:
        """Return a conversation without replies as text and ids, cached because many episodes share it."""
        contents = tuple((message["role"], message["content"]) for message in messages)
        key = contents, json.dumps(tools) if tools else ""
        return self._openings.get(key, lambda: self._open(*key))

    def _open(self, contents: tuple[tuple[str, str], ...], tools: str) -> tuple[str, tuple[int, ...]]:
        messages: list[TemplateMessage] = [{"role": role, "content": content} for role, content in contents]
        variables: Tools | None = json.loads(tools) if tools else None
        rendered = self.render(messages, variables)
        return rendered.text, tuple(self.encode(messages, rendered, variables))

    def encode(
        self,
        messages: Sequence[TemplateMessage],
        rendered: Rendered,
        tools: Tools | None = None,
        *,
        start: int = 0,
        before: str = "",
        num_new: int = 1,
    ) -> list[int]:
        """Return the ids of the rendered text from ``start`` on, with the template's control tokens only.

        From ``start`` 0 that is the whole conversation, otherwise its last ``num_new`` messages.
        """
        # A template that looks for special tokens in replies must see them whole.
        has_replies = not start and any(message["role"] == "assistant" for message in messages)
        replies = has_replies and self.render(messages, tools, replies=True).text == rendered.text
        harmless = self._harmless(messages, len(messages) - num_new if start else 0)
        harmless_tools = tools if start else self._without_controls(tools)
        plain = self.render(harmless, harmless_tools, replies=replies)
        expected = self._controls_in(self.codec.encode(plain.pieces(start), before))
        controls: list[int] = []
        for hard in (False, True):
            again = rendered
            if hard or replies:
                again = self.render(messages, tools, hard=hard, replies=replies)
            ids = self.codec.encode(again.pieces(start), before)
            controls = self._controls_in(ids)
            if again.text == rendered.text and controls == expected:
                return ids
        names = {number: token for token, number in self.controls.items()}
        raise UsageError(
            "An observation or a tool becomes control tokens that the chat template did not write: expected "
            f"{[names[i] for i in expected]}, found {[names[i] for i in controls]}."
        )

    def call_text(self, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        """Return tool calls as the text of a reply, in the template's own words where it has any."""
        written = self._written_calls(calls, tools)
        return self.facts.lead + self.tools.format.write(calls) if written is None else written

    def forced_call(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the ids with which every call of one of these tools begins.

        A reply that starts with them can only continue as such a call. Empty where that cannot be had: the
        template starts replies with something else, such as reasoning, or the calls have no common start.
        """
        return self._cached_forced(tuple(names))

    def _forced(self, names: tuple[str, ...]) -> tuple[int, ...]:
        tools = [ToolSpec(name=name, description="") for name in names]
        if self.opens_reasoning and not self.tools.native:
            return ()  # a call there would be a part of the reasoning
        common: list[int] | None = None
        for call in (ToolCall(name=name, arguments=some) for name in names for some in _ARGUMENTS):
            text = self._written_calls([call], tools) if self.tools.native else self.call_text([call], tools)
            if text is None:
                return ()
            ids = self.codec.encode([text], before=MIDDLE)
            common = ids if common is None else ids[: _num_equal(common, ids)]
        commits = common is not None and self.tools.format.opens in self.codec.decode(common)
        return tuple(common) if common and commits else ()

    def _written_calls(self, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str | None:
        """Return calls as the template writes them after its generation prompt; ``None`` if it does not."""
        user: TemplateMessage = {"role": "user", "content": _HARMLESS}
        if not self.tools.native:
            return None
        variables = self.tool_variables(tools)
        named = [replace(call, id=call.id or f"call{n:05d}") for n, call in enumerate(calls)]
        reply = {"role": "assistant", "content": "", "tool_calls": [template_call(call) for call in named]}
        try:
            opening = self.apply([user], tools=variables)
            closed = self.apply([user, reply], tools=variables, generation=False).rstrip()
        except UsageError:
            return None  # such as several calls, where the template knows one
        ends = [token for token in self.codec.added if token.strip() and closed.endswith(token)]
        if not closed.startswith(opening):
            return None
        return closed[len(opening) :].removesuffix(max(ends, key=len, default=""))

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

    def _mark(self, message: TemplateMessage, mark: str, hard: bool, replies: bool) -> TemplateMessage:
        content = message["content"]
        if message["role"] == "assistant":
            # The template may look for tags in replies, so only special tokens are split, and only if asked.
            marked = dict(message)
            for key in ("content", *REASONING_KEYS):
                if replies and key in message:
                    marked[key] = self._special_starts.sub(rf"\1{mark}", message[key])
            if "tool_calls" in message:
                marked["tool_calls"] = self._mark_value(message["tool_calls"], mark, hard)
            return marked
        if hard:
            core = content.strip()
            content = content.replace(core, mark + mark.join(core) + mark, 1) if core else content
        else:
            content = self._control_starts.sub(rf"\1{mark}", content)
        if "name" in message:
            return {**message, "content": content, "name": self._mark_value(message["name"], mark, hard)}
        return {**message, "content": content}

    def _mark_value(self, value: Any, mark: str, hard: bool) -> Any:
        """Mark control tokens in the strings of a JSON value; the template may look at other strings."""

        def mark_text(text: str) -> str:
            marked = self._control_starts.sub(rf"\1{mark}", text)
            return marked if marked == text or not hard else mark + mark.join(text) + mark

        return _map_text(value, mark_text)

    def _without_controls(self, value: Any) -> Any:
        """Return a JSON value in which no string contains a control token."""

        def replace(text: str) -> str:
            while (again := self._control_starts.sub(_HARMLESS, text)) != text:
                text = again
            return text

        return _map_text(value, replace)

    def _harmless(self, messages: Sequence[TemplateMessage], first: int) -> list[TemplateMessage]:
        """Return the same conversation without anything from ``first`` on that could be a control token."""
        harmless = list(messages)
        for index, message in enumerate(messages[first:], first):
            if message["role"] == "assistant":
                if "tool_calls" in message:
                    harmless[index] = {**message, "tool_calls": self._without_controls(message["tool_calls"])}
                continue
            changed = {"content": _HARMLESS} if message["content"].strip() else {}
            if "name" in message:
                changed["name"] = self._without_controls(message["name"])
            harmless[index] = {**message, **changed}
        return harmless


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


@functools.cache
def _forms(mark: str) -> tuple[str, ...]:
    """Return the texts that a template may write for a mark: itself, and escaped in JSON or by Python."""
    return mark, json.dumps(mark)[1:-1], repr(mark)[1:-1]


def _map_text(value: Any, function: Callable[[str], str]) -> Any:
    """Return a JSON value with a function applied to its strings and keys."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {function(str(key)): _map_text(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_text(item, function) for item in value]
    return value


def _all_text(messages: Sequence[TemplateMessage], tools: Tools | None) -> str:
    """Return all text of a conversation, in which a mark must not occur."""
    parts = [message["content"] for message in messages]
    parts += [
        json.dumps(message, ensure_ascii=False)
        for message in messages
        if message.keys() - {"role", "content"}
    ]
    return "".join([*parts, json.dumps(tools, ensure_ascii=False)] if tools else parts)


def _starts(tokens: Sequence[str] | frozenset[str] | dict[str, int]) -> re.Pattern[str]:
    """Return a pattern of the first character of each of these tokens."""
    longer = [re.escape(token) for token in tokens if len(token) > 1]
    return re.compile(f"(?=(?:{'|'.join(longer)}))(.)" if longer else "(?!)()", re.DOTALL)
