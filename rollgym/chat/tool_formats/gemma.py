"""Gemma 4 and FunctionGemma. A call has bare keys, and strings between a token that nothing else uses."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.chat.tool_formats.base import MalformedCall, ToolFormat
from rollgym.chat.tool_formats.call_json import MAX_DEPTH, calls_of, json_at
from rollgym.chat.tool_formats.reasoning import before_markers, split_reasoning
from rollgym.core.messages import ToolCall

__all__ = ["FUNCTION_GEMMA", "GEMMA"]


@dataclass(frozen=True, slots=True)
class _Marks:
    """The tokens of one version."""

    open: str
    close: str
    quote: str
    result: str
    """Starts a result: the model ends a call with it."""


_NAME = re.compile(r"\s*call:\s*([^\s{}]+)\s*(?=\{)")
_BARE_KEY = re.compile(r"[^\s:,{}\[\]\"<]+")
_PLAIN_KEY = re.compile(r"[\w.-]+")


def _read(marks: _Marks, text: str) -> tuple[str, list[ToolCall]]:
    calls: list[ToolCall] = []
    outside: list[str] = []
    position = 0
    while (start := text.find(marks.open, position)) >= 0:
        outside.append(text[position:start])
        name = _NAME.match(text, start + len(marks.open))
        if name is None:
            raise MalformedCall("call:NAME{…} must follow")
        arguments, end = _value(text, name.end(), marks.quote, 0)
        calls += calls_of({"name": name[1], "arguments": arguments})
        rest = text[end:].lstrip()
        if rest and not rest.startswith(marks.close):
            raise MalformedCall(f"{marks.close} is missing")
        position = len(text) - len(rest) + (len(marks.close) if rest else 0)
    outside.append(text[position:])
    if marks.close in outside[-1] and not calls:
        raise MalformedCall(f"{marks.open} is missing")
    return "".join(outside), calls


def _value(text: str, position: int, quote: str, depth: int) -> tuple[Any, int]:
    """Return the value at a position, and where it ends."""
    if depth > MAX_DEPTH:
        raise MalformedCall(f"it is nested more than {MAX_DEPTH} levels deep")
    position = _past_space(text, position)
    if text.startswith(quote, position):
        return _string(text, position, quote)
    if text.startswith("[", position):
        return _list(text, position + 1, quote, depth)
    if text.startswith("{", position):
        return _object(text, position + 1, quote, depth)
    return json_at(text, position)


def _object(text: str, position: int, quote: str, depth: int) -> tuple[dict[str, Any], int]:
    items: dict[str, Any] = {}
    position = _past_space(text, position)
    while not text.startswith("}", position):
        key, position = _key(text, position, quote)
        position = _past_space(text, position)
        if not text.startswith(":", position):
            raise MalformedCall("a colon is missing after a key")
        items[key], position = _value(text, position + 1, quote, depth + 1)
        position = _past_comma(text, position, "}")
    return items, position + 1


def _list(text: str, position: int, quote: str, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    position = _past_space(text, position)
    while not text.startswith("]", position):
        item, position = _value(text, position, quote, depth + 1)
        items.append(item)
        position = _past_comma(text, position, "]")
    return items, position + 1


def _key(text: str, position: int, quote: str) -> tuple[str, int]:
    if text.startswith(quote, position):
        return _string(text, position, quote)
    if text.startswith('"', position):
        key, end = json_at(text, position)
        return str(key), end
    bare = _BARE_KEY.match(text, position)
    if bare is None:
        raise MalformedCall("the name of an argument is missing")
    return bare[0], bare.end()


def _string(text: str, position: int, quote: str) -> tuple[str, int]:
    start = position + len(quote)
    end = text.find(quote, start)
    if end < 0:
        raise MalformedCall("a string does not end")
    return text[start:end], end + len(quote)


def _past_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _past_comma(text: str, position: int, close: str) -> int:
    """Return where the next item, or the end, begins."""
    position = _past_space(text, position)
    if text.startswith(",", position):
        return _past_space(text, position + 1)
    if not text.startswith(close, position):
        raise MalformedCall(f"a comma or {close} is missing")
    return position


def _start(marks: _Marks, text: str) -> int:
    return before_markers(text, (marks.open,))


def _write(marks: _Marks, calls: Sequence[ToolCall]) -> str:
    return "".join(
        f"{marks.open}call:{call.name}{_written(call.arguments, marks.quote)}{marks.close}" for call in calls
    )


def _written(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            keys = {key: key if _PLAIN_KEY.fullmatch(key) else f"{quote}{key}{quote}" for key in value}
            items = (f"{keys[key]}:{_written(item, quote)}" for key, item in value.items())
            return "{" + ",".join(items) + "}"
        case list():
            return "[" + ",".join(_written(item, quote) for item in value) + "]"
        case _:
            return json.dumps(value)


def _format(name: str, marks: _Marks) -> ToolFormat:
    return ToolFormat(
        name=name,
        read=functools.partial(_read, marks),
        write=functools.partial(_write, marks),
        split=split_reasoning,
        call_start=functools.partial(_start, marks),
        opens=f"{marks.open}call:",
        stops=(marks.result,),
    )


GEMMA = _format("gemma", _Marks("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"))
FUNCTION_GEMMA = _format(
    "functiongemma",
    _Marks("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"),
)
