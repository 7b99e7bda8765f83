"""Llama 3.x. A call is bare JSON, perhaps after a tag."""

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
from rollgym.chat.tool_formats.reasoning import split_reasoning
from rollgym.core.messages import ToolCall

__all__ = ["LLAMA"]

_PYTHON_TAG = "<|python_tag|>"


def _read(text: str) -> tuple[str, list[ToolCall]]:
    body = text.strip()
    tagged = body.startswith(_PYTHON_TAG)
    body = body.removeprefix(_PYTHON_TAG)
    if not tagged and not looks_like_a_call(body):
        return text, []
    calls: list[ToolCall] = []
    position = 0
    while position < len(body):
        value, position = json_at(body, position)
        calls += calls_of(value)
        separator = re.compile(r"[\s;,]*").match(body, position)
        position = separator.end() if separator else position
    if not calls:
        raise MalformedCall("no call follows")
    return "", calls


def _start(text: str) -> int:
    if may_start_as_call(text) or text.lstrip().startswith(_PYTHON_TAG):
        return 0
    return 0 if _PYTHON_TAG.startswith(text.lstrip()) else len(text)


def _write(calls: Sequence[ToolCall]) -> str:
    return "; ".join(call_object(call, "parameters") for call in calls)


LLAMA = ToolFormat(
    name="llama",
    read=_read,
    write=_write,
    split=split_reasoning,
    call_start=_start,
    opens='{"name"',
    stops=("<|eom_id|>",),
)
