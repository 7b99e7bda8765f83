"""GPT-OSS's Harmony. A reply consists of messages in channels; a call is a message to a tool."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollgym.chat.tool_formats.base import MalformedCall, ToolFormat
from rollgym.chat.tool_formats.call_json import calls_of, json_at
from rollgym.chat.tool_formats.reasoning import before_markers
from rollgym.core.messages import ToolCall

__all__ = ["HARMONY", "unfinished_channels"]

_WORDS = ("start", "channel", "constrain", "message", "end", "call", "return")
_MARK = re.compile(rf"<\|(?:{'|'.join(_WORDS)})\|>")


@dataclass(frozen=True, slots=True)
class _Part:
    """One message of a reply: the text before ``<|message|>`` by its marks, and the text after it."""

    channel: str
    recipient: str
    text: str


def _parts(text: str) -> Iterator[_Part]:
    for part in re.split(r"<\|(?:end|call|return)\|>|<\|start\|>", text):
        header, marked, body = part.partition("<|message|>")
        if not part.strip() or (not marked and not header.strip().removeprefix("assistant").strip()):
            continue
        if not marked and "<|channel|>" not in header:
            yield _Part("final", "", part)
            continue
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"\bto=([^\s<]+)", header)
        yield _Part(
            channel[1] if channel else "final",
            recipient[1] if recipient else "",
            _MARK.sub("", body),
        )


def _start(text: str) -> int:
    return 0  # where a call is malformed, all of the text is shown


def _split(text: str, opened: bool = False) -> tuple[str, str]:
    thoughts = [p.text.strip() for p in _parts(text) if p.channel == "analysis" and not p.recipient]
    return "\n".join(thought for thought in thoughts if thought), text


def unfinished_channels(text: str) -> str:
    """Return the reasoning so far of an unfinished reply in channels."""
    whole = 0
    for mark in _MARK.finditer(text):
        whole = mark.end()
    marks = [f"<|{word}|>" for word in _WORDS]
    return _split(text[: whole + before_markers(text[whole:], marks)])[0]


def _read(text: str) -> tuple[str, list[ToolCall]]:
    content: list[str] = []
    calls: list[ToolCall] = []
    for part in _parts(text):
        if part.recipient:
            if not part.recipient.startswith("functions."):
                raise MalformedCall(f"{part.recipient[:80]!r} is not a tool: names start with functions.")
            arguments, end = json_at(part.text, 0) if part.text.strip() else ({}, 0)
            if part.text[end:].strip():
                raise MalformedCall("text follows the arguments")
            calls += calls_of([{"name": part.recipient.removeprefix("functions."), "arguments": arguments}])
        elif part.channel != "analysis":
            content.append(part.text.strip())
    return "\n".join(part for part in content if part), calls


def _write(calls: Sequence[ToolCall]) -> str:
    return "<|end|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        f"{json.dumps(call.arguments, ensure_ascii=False)}"
        for call in calls
    )


HARMONY = ToolFormat(
    name="harmony",
    read=_read,
    write=_write,
    split=_split,
    call_start=_start,
    opens="to=functions.",
    stops=("<|call|>", "<|return|>"),
    channels=True,
)
