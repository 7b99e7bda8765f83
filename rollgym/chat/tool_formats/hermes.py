"""Hermes: Qwen2.5, Qwen3, SmolLM3. A call is JSON between tags."""

from __future__ import annotations

from collections.abc import Sequence

from rollgym.chat.tool_formats.base import MalformedCall, ToolFormat
from rollgym.chat.tool_formats.call_json import call_object, calls_of, json_at
from rollgym.chat.tool_formats.reasoning import before_markers, split_reasoning
from rollgym.core.messages import ToolCall

__all__ = ["HERMES", "OPEN", "read_hermes"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read_hermes(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text outside the calls, and the calls; raises `MalformedCall` or another `ValueError`."""
    calls: list[ToolCall] = []
    outside: list[str] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        outside.append(text[position:start])
        # Decoded and not cut at the next closing tag, which a string in the arguments may contain.
        value, end = json_at(text, start + len(OPEN))
        calls += calls_of(value)
        rest = text[end:].lstrip()
        if rest and not rest.startswith(CLOSE):
            raise MalformedCall(f"{CLOSE} is missing")
        position = len(text) - len(rest) + (len(CLOSE) if rest else 0)
    outside.append(text[position:])
    if CLOSE in outside[-1] and not calls:
        raise MalformedCall(f"{OPEN} is missing")
    return "".join(outside), calls


def _start(text: str) -> int:
    return before_markers(text, (OPEN,))


def _write(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"{OPEN}\n{call_object(call)}\n{CLOSE}" for call in calls)


HERMES = ToolFormat(
    name="hermes", read=read_hermes, write=_write, split=split_reasoning, call_start=_start, opens=OPEN
)
