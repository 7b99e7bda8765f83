"""Mistral. Calls follow a mark, as a JSON list, or each after the name of its tool."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollgym.chat.tool_formats.base import MalformedCall, ToolFormat
from rollgym.chat.tool_formats.call_json import call_object, calls_of, json_at
from rollgym.chat.tool_formats.reasoning import before_markers, split_reasoning
from rollgym.core.messages import ToolCall

__all__ = ["MISTRAL"]

_TOOL_CALLS = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([^\s\[\]{}]+?)\s*(?:\[CALL_ID\](\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def _read(text: str) -> tuple[str, list[ToolCall]]:
    content, *parts = text.split(_TOOL_CALLS)
    calls: list[ToolCall] = []
    for part in parts:
        named = _NAMED.match(part)
        value, end = json_at(part, named.end() if named else 0)
        if part[end:].strip():
            raise MalformedCall("text follows the call")
        if named:
            value = {"name": named[1], "arguments": value, "id": named[2]}
        calls += calls_of(value)
    if parts and not calls:
        raise MalformedCall("no call follows")
    return content, calls


def _start(text: str) -> int:
    return before_markers(text, (_TOOL_CALLS,))


def _write(calls: Sequence[ToolCall]) -> str:
    return f"{_TOOL_CALLS}[{', '.join(call_object(call) for call in calls)}]"


MISTRAL = ToolFormat(
    name="mistral", read=_read, write=_write, split=split_reasoning, call_start=_start, opens=_TOOL_CALLS
)
