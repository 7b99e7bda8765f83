"""A JSON code block, for models whose template has no form of a call: the prompt describes it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollgym.chat.tool_formats.base import MalformedCall, ToolFormat
from rollgym.chat.tool_formats.call_json import (
    call_object,
    calls_of,
    json_at,
    looks_like_a_call,
    may_start_as_call,
)
from rollgym.chat.tool_formats.hermes import OPEN, read_hermes
from rollgym.chat.tool_formats.reasoning import before_markers, split_reasoning
from rollgym.core.messages import ToolCall

__all__ = ["JSON_BLOCK"]

_FENCE = re.compile(r"```(\w*)[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_LANGUAGES = ("", "json", "tool", "tool_call", "tool_calls", "tool_code")


def _read(text: str) -> tuple[str, list[ToolCall]]:
    if OPEN in text:
        return read_hermes(text)
    if looks_like_a_call(text):
        value, end = json_at(text, 0)
        return text[end:], calls_of(value)
    calls: list[ToolCall] = []
    content, position = [], 0
    for block in _FENCE.finditer(text):
        if block[1].lower() not in _LANGUAGES or not looks_like_a_call(block[2]):
            continue
        value, end = json_at(block[2], 0)
        if block[2][end:].strip():
            raise MalformedCall("text follows the call in its code block")
        calls += calls_of(value)
        content.append(text[position : block.start()])
        position = block.end()
    return "".join([*content, text[position:]]), calls


def _start(text: str) -> int:
    return 0 if may_start_as_call(text) else before_markers(text, ("```", OPEN))


def _write(calls: Sequence[ToolCall]) -> str:
    objects = [call_object(call) for call in calls]
    return f"```json\n{objects[0] if len(objects) == 1 else '[' + ', '.join(objects) + ']'}\n```"


JSON_BLOCK = ToolFormat(
    name="json",
    read=_read,
    write=_write,
    split=split_reasoning,
    call_start=_start,
    opens='```json\n{"name"',
)
