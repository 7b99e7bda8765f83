"""Formats of tool calls in the text of a reply, by model family: how to read them and how to write them.

`ToolFormat.parse` never raises: a malformed call becomes `ParsedReply.error`, a sentence for the agent.

==========  ============================================================  ===============================
name        a call                                                        families
==========  ============================================================  ===============================
hermes      ``<tool_call>{"name": …, "arguments": …}</tool_call>``        Qwen2.5, Qwen3, SmolLM2, SmolLM3
llama       ``{"name": …, "parameters": …}``, ``<|python_tag|>`` before   Llama 3.x
mistral     ``[TOOL_CALLS][{"name": …, "arguments": …}]``                 Mistral
harmony     ``<|channel|>commentary to=functions.NAME<|message|>{…}``     GPT-OSS
json        a JSON code block with a name and arguments                   any: the prompt describes it
==========  ============================================================  ===============================
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.core.errors import UsageError
from rollgym.core.messages import ToolCall, ToolSpec
from rollgym.core.serialization import jsonable

__all__ = [
    "FORMATS",
    "ParsedReply",
    "ToolFormat",
    "before_markers",
    "find_format",
    "opens_reasoning",
    "split_reasoning",
    "split_unfinished",
    "unfinished_channels",
]

MAX_DEPTH = 64
"""Nesting of arguments; deeper ones are malformed."""
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_EXAMPLE = ToolCall(name="NAME", arguments={"ARGUMENT": "VALUE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A reply by its parts."""

    content: str = ""
    """The text for the reader, without reasoning and calls."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    rest: str = ""
    """The text after the reasoning, with the calls."""
    error: str = ""
    """The problem with a malformed call, as a sentence; then there are no calls. Empty without one."""
    in_parts: bool = False
    """True where the text is not all content: it has calls, or reasoning, perhaps an empty one."""


class _Malformed(ValueError):
    """Text that was meant as a call and is not one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model family writes tool calls."""

    name: str
    read: Callable[[str], tuple[str, list[ToolCall]]]
    """Returns the text outside the calls, and the calls; raises `ValueError` for a malformed one."""
    write: Callable[[Sequence[ToolCall]], str]
    """Returns calls as the text of a reply, where the chat template does not write them."""
    split: Callable[[str, bool], tuple[str, str]]
    """Returns the reasoning and the rest; the flag says whether the prompt has opened reasoning."""
    call_start: Callable[[str], int]
    """Returns how much of an unfinished text is certain to stay outside the calls."""
    opens: str
    """Text with which a reply commits itself to a call."""
    stops: tuple[str, ...] = ()
    """Tokens that end a call, besides the template's own."""
    channels: bool = False
    """True where a reply consists of channels, so that its text cannot be the content of a message."""

    def parse(self, text: str, *, opened: bool = True) -> ParsedReply:
        """Return the parts of a reply, given with its special tokens.

        Args:
            text: The reply.
            opened: Whether the prompt may have opened reasoning, so that the opening tag is missing.
        """
        reasoning, rest = self.split(text, opened)
        thought = self.channels or rest is not text
        try:
            content, calls = self.read(rest)
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, _Malformed) else "it is not valid JSON"
            return ParsedReply(
                content=rest.strip(),
                reasoning=reasoning,
                rest=rest,
                in_parts=thought,
                error=f"The tool call is malformed: {reason}. Expected: {self.write([_EXAMPLE])}",
            )
        return ParsedReply(
            content=content.strip(),
            reasoning=reasoning,
            calls=tuple(calls),
            rest=rest,
            in_parts=thought or bool(calls),
        )

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        """Return the tools and the form of a call, for the prompt of a template without tools."""
        lines = "\n".join(json.dumps(spec.to_openai()["function"], ensure_ascii=False) for spec in tools)
        return (
            f"You can call tools. Each line is a tool and the JSON schema of its arguments:\n{lines}\n\n"
            f"To call a tool, answer in this form:\n{self.write([_EXAMPLE])}\n"
            "The result is in the next message."
        )


def find_format(name: str) -> ToolFormat:
    """Return a format by its name."""
    if name not in FORMATS:
        raise UsageError(f"tool_format must be auto or one of {', '.join(FORMATS)}, not {name!r}.")
    return FORMATS[name]


def split_reasoning(text: str, opened: bool = True) -> tuple[str, str]:
    """Return the reasoning at the start of a reply, and the rest: the text itself if it has no reasoning.

    Reasoning that was cut off has no rest.

    Args:
        text: The reply.
        opened: Whether the prompt may have opened reasoning, so that the opening tag is missing.

    Example:
        >>> split_reasoning("<think>Left is a wall.</think>Up")
        ('Left is a wall.', 'Up')
    """
    for start, end in _REASONING:
        before, closed, rest = text.partition(end)
        head, tag, inside = before.partition(start)
        if closed and (not head.strip() if tag else opened):
            return (inside if tag else before).strip(), rest
        if tag and not closed and not head.strip():
            return inside.strip(), ""
    return "", text


def split_unfinished(text: str, opened: bool) -> tuple[str, str] | None:
    """Return the reasoning so far and the rest of an unfinished reply: the text itself without reasoning.

    ``None`` while it is not certain whether the reply starts with reasoning.
    """
    if opened:
        # Until the end, all of it may turn out to be content.
        start, end = _REASONING[0]
        return split_reasoning(text) if end in text and start not in text.partition(end)[0] else None
    start_of_text = text.lstrip()
    for start, end in _REASONING:
        if start.startswith(start_of_text):
            return None
        if start_of_text.startswith(start):
            inside, closed, rest = start_of_text[len(start) :].partition(end)
            return (inside if closed else inside[: before_markers(inside, (end,))]).strip(), rest
    return "", text


def before_markers(text: str, markers: Sequence[str]) -> int:
    """Return the length of an unfinished text before the first marker, which may be incomplete."""
    places = [place for marker in markers if (place := text.find(marker)) >= 0]
    longest = max((len(marker) for marker in markers), default=0)
    for place in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[place:]) for marker in markers):
            places.append(place)
            break
    return min(places, default=len(text))


def opens_reasoning(prompt: str) -> bool:
    """Return whether a prompt ends inside reasoning, so that a reply starts without the opening tag."""
    return any(prompt.rfind(start) > prompt.rfind(end) for start, end in _REASONING)


# Reading JSON.


def _refuse_constant(name: str) -> Any:
    raise _Malformed(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def _json_at(text: str, position: int) -> tuple[Any, int]:
    """Return the JSON value at a position, after white space, and where it ends."""
    while position < len(text) and text[position].isspace():
        position += 1
    return _decoder.raw_decode(text, position)


def _depth(value: Any) -> int:
    """Return the nesting of a value; stops counting above the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner: list[Any] = []
        for part in level:
            inner += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        level, depth = inner, depth + 1
    return depth


def _calls_of(value: Any) -> list[ToolCall]:
    """Return the calls of a JSON value: an object, or a list of objects."""
    if _depth(value) > MAX_DEPTH:
        raise _Malformed(f"it is nested more than {MAX_DEPTH} levels deep")
    return [_call_of(item) for item in (value if isinstance(value, list) else [value])]


def _call_of(value: Any) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {**value["function"], "id": value.get("id")}
    if not isinstance(value, dict):
        raise _Malformed("a call must be a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _Malformed("the name of a tool is missing")
    arguments: Any = next(
        (value[key] for key in ("arguments", "parameters") if value.get(key) is not None), {}
    )
    if isinstance(arguments, str):
        arguments = _decoder.decode(arguments) if arguments.strip() else {}
        if _depth(arguments) > MAX_DEPTH:
            raise _Malformed(f"it is nested more than {MAX_DEPTH} levels deep")
    if not isinstance(arguments, dict):
        raise _Malformed(f"the arguments of {name[:80]!r} must be a JSON object")
    identifier = value.get("id")
    return ToolCall(
        name=jsonable(name),
        arguments=jsonable(arguments),
        id=jsonable(identifier) if isinstance(identifier, str) else "",
    )


def _looks_like_a_call(text: str) -> bool:
    return re.match(r"\s*\[?\s*\{", text) is not None and '"name"' in text


_JSON_START = re.compile(r"\s*(?:\[?\s*\{|\[?\s*\Z)")


def _may_start_as_call(text: str) -> bool:
    """Whether an unfinished text may turn out to be a call as bare JSON."""
    return _JSON_START.match(text) is not None


def _object(call: ToolCall, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


# Hermes: Qwen2.5, Qwen3, SmolLM2, SmolLM3.

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def _read_hermes(text: str) -> tuple[str, list[ToolCall]]:
    calls: list[ToolCall] = []
    outside: list[str] = []
    position = 0
    while (start := text.find(_OPEN, position)) >= 0:
        outside.append(text[position:start])
        # Decoded and not cut at the next closing tag, which a string in the arguments may contain.
        value, end = _json_at(text, start + len(_OPEN))
        calls += _calls_of(value)
        rest = text[end:].lstrip()
        if rest and not rest.startswith(_CLOSE):
            raise _Malformed(f"{_CLOSE} is missing")
        position = len(text) - len(rest) + (len(_CLOSE) if rest else 0)
    outside.append(text[position:])
    if _CLOSE in outside[-1] and not calls:
        raise _Malformed(f"{_OPEN} is missing")
    return "".join(outside), calls


def _start_hermes(text: str) -> int:
    return before_markers(text, (_OPEN,))


def _write_hermes(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"{_OPEN}\n{_object(call)}\n{_CLOSE}" for call in calls)


# Llama 3.x.

_PYTHON_TAG = "<|python_tag|>"


def _read_llama(text: str) -> tuple[str, list[ToolCall]]:
    body = text.strip()
    tagged = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG)
    if not tagged and not _looks_like_a_call(body):
        return text, []
    calls: list[ToolCall] = []
    position = 0
    while position < len(body):
        value, position = _json_at(body, position)
        calls += _calls_of(value)
        separator = re.compile(r"[\s;,]*").match(body, position)
        position = separator.end() if separator else position
    if not calls:
        raise _Malformed("no call follows")
    return "", calls


def _start_llama(text: str) -> int:
    if _may_start_as_call(text) or text.lstrip().startswith(_PYTHON_TAG):
        return 0
    return 0 if _PYTHON_TAG.startswith(text.lstrip()) else len(text)


def _write_llama(calls: Sequence[ToolCall]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


# Mistral.

_TOOL_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\s\[\]{}]+?)\s*(?:\[CALL_ID\](\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def _read_mistral(text: str) -> tuple[str, list[ToolCall]]:
    content, *parts = text.split(_TOOL_CALLS)
    calls: list[ToolCall] = []
    for part in parts:
        named = _NAMED.match(part)
        value, end = _json_at(part, named.end() if named else 0)
        if part[end:].strip():
            raise _Malformed("text follows the call")
        if named:
            value = {"name": named[1], "arguments": value, "id": named[2]}
        calls += _calls_of(value)
    if parts and not calls:
        raise _Malformed("no call follows")
    return content, calls


def _start_mistral(text: str) -> int:
    return before_markers(text, (_TOOL_CALLS,))


def _write_mistral(calls: Sequence[ToolCall]) -> str:
    return f"{_TOOL_CALLS}[{', '.join(_object(call) for call in calls)}]"


# GPT-OSS's Harmony.

_HARMONY_WORDS = ("start", "channel", "constrain", "message", "end", "call", "return")
_HARMONY_MARK = re.compile(rf"<\|(?:{'|'.join(_HARMONY_WORDS)})\|>")


@dataclass(frozen=True, slots=True)
class _HarmonyPart:
    """One message of a reply: the text before ``<|message|>`` by its marks, and the text after it."""

    channel: str
    recipient: str
    text: str


def _harmony_parts(text: str) -> Iterator[_HarmonyPart]:
    for part in re.split(r"<\|(?:end|call|return)\|>|<\|start\|>", text):
        header, marked, body = part.partition("<|message|>")
        if not part.strip() or (not marked and not header.strip().removeprefix("assistant").strip()):
            continue
        if not marked and "<|channel|>" not in header:
            yield _HarmonyPart("final", "", part)
            continue
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"\bto=([^\s<]+)", header)
        yield _HarmonyPart(
            channel[1] if channel else "final",
            recipient[1] if recipient else "",
            _HARMONY_MARK.sub("", body),
        )


def _start_harmony(text: str) -> int:
    return 0  # where a call is malformed, all of the text is shown


def _split_harmony(text: str, opened: bool = False) -> tuple[str, str]:
    thoughts = [p.text.strip() for p in _harmony_parts(text) if p.channel == "analysis" and not p.recipient]
    return "\n".join(thought for thought in thoughts if thought), text


def unfinished_channels(text: str) -> str:
    """Return the reasoning so far of an unfinished reply in channels."""
    whole = 0
    for mark in _HARMONY_MARK.finditer(text):
        whole = mark.end()
    marks = [f"<|{word}|>" for word in _HARMONY_WORDS]
    return _split_harmony(text[: whole + before_markers(text[whole:], marks)])[0]


def _read_harmony(text: str) -> tuple[str, list[ToolCall]]:
    content: list[str] = []
    calls: list[ToolCall] = []
    for part in _harmony_parts(text):
        if part.recipient:
            if not part.recipient.startswith("functions."):
                raise _Malformed(f"{part.recipient[:80]!r} is not a tool: names start with functions.")
            arguments, end = _json_at(part.text, 0) if part.text.strip() else ({}, 0)
            if part.text[end:].strip():
                raise _Malformed("text follows the arguments")
            calls += _calls_of([{"name": part.recipient.removeprefix("functions."), "arguments": arguments}])
        elif part.channel != "analysis":
            content.append(part.text.strip())
    return "\n".join(part for part in content if part), calls


def _write_harmony(calls: Sequence[ToolCall]) -> str:
    return "<|end|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        f"{json.dumps(call.arguments, ensure_ascii=False)}"
        for call in calls
    )


# A JSON code block, for models that have no form of a call.

_FENCE = re.compile(r"```(\w*)[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_LANGUAGES = ("", "json", "tool", "tool_call", "tool_calls", "tool_code")


def _read_json(text: str) -> tuple[str, list[ToolCall]]:
    if _OPEN in text:
        return _read_hermes(text)
    if _looks_like_a_call(text):
        value, end = _json_at(text, 0)
        return text[end:], _calls_of(value)
    calls: list[ToolCall] = []
    content, position = [], 0
    for block in _FENCE.finditer(text):
        if block[1].lower() not in _LANGUAGES or not _looks_like_a_call(block[2]):
            continue
        value, end = _json_at(block[2], 0)
        if block[2][end:].strip():
            raise _Malformed("text follows the call in its code block")
        calls += _calls_of(value)
        content.append(text[position : block.start()])
        position = block.end()
    return "".join([*content, text[position:]]), calls


def _start_json(text: str) -> int:
    return 0 if _may_start_as_call(text) else before_markers(text, ("```", _OPEN))


def _write_json(calls: Sequence[ToolCall]) -> str:
    objects = [_object(call) for call in calls]
    return f"```json\n{objects[0] if len(objects) == 1 else '[' + ', '.join(objects) + ']'}\n```"


FORMATS: dict[str, ToolFormat] = {
    format.name: format
    for format in (
        ToolFormat(
            name="hermes",
            read=_read_hermes,
            write=_write_hermes,
            split=split_reasoning,
            call_start=_start_hermes,
            opens=_OPEN,
        ),
        ToolFormat(
            name="llama",
            read=_read_llama,
            write=_write_llama,
            split=split_reasoning,
            call_start=_start_llama,
            opens='{"name"',
            stops=("<|eom_id|>",),
        ),
        ToolFormat(
            name="mistral",
            read=_read_mistral,
            write=_write_mistral,
            split=split_reasoning,
            call_start=_start_mistral,
            opens=_TOOL_CALLS,
        ),
        ToolFormat(
            name="harmony",
            read=_read_harmony,
            write=_write_harmony,
            split=_split_harmony,
            call_start=_start_harmony,
            opens="to=functions.",
            stops=("<|call|>", "<|return|>"),
            channels=True,
        ),
        ToolFormat(
            name="json",
            read=_read_json,
            write=_write_json,
            split=split_reasoning,
            call_start=_start_json,
            opens='```json\n{"name"',
        ),
    )
}
"""Formats by name."""
