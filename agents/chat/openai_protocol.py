"""Parsing of responses of OpenAI-compatible endpoints: replies, token counts, errors, malformed bodies."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from rollgym.core.errors import AgentError
from rollgym.core.messages import Message, ToolCall
from rollgym.core.serialization import clean_text, jsonable
from rollgym.core.tools import with_ids
from rollgym.utils.retry import RetryableError

_RETRIED = frozenset({408, 409, 425, 429})
_MAY_OVERFLOW = frozenset({400, 413, 422})
_OVERFLOW = re.compile(
    r"context[ _-]?(length|window|size)|exceed_context|maximum context|prompt is too long|too many tokens",
    re.IGNORECASE,
)
_MAY_REFUSE_TOOLS = frozenset({400, 404, 405, 415, 422})
_ABOUT_TOOLS = re.compile(r"tools?\b|tool_|function call", re.IGNORECASE)
_NO_TEXT_REASONS = frozenset({"length", "content_filter"})
MESSAGE_CHARS = 200


class ContextOverflow(AgentError):
    """The conversation is longer than the model's context."""


class ToolsRefused(AgentError):
    """The endpoint does not accept tools in a request."""


class Tokens(NamedTuple):
    """Token counts of one or more requests."""

    prompt: int
    completion: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One reply of the model."""

    text: str
    """The whole reply; reasoning from a separate field comes first, in think tags."""
    finish_reason: str | None = None
    calls: tuple[ToolCall, ...] = ()
    """Tool calls, each with an id."""
    call_error: str = ""
    """The problem with malformed tool calls, as a sentence; then there are none."""


def check_status(status: int, headers: Mapping[str, str], body: Any) -> None:
    """Raise for every status that is not a success: `RetryableError` where a retry may succeed."""
    if 200 <= status < 300:
        return
    message = server_message(body)
    text = f"The endpoint answered {status}{': ' + message if message else ''}"
    if status in _RETRIED or status >= 500:
        raise RetryableError(text, retry_after(headers.get("retry-after")))
    if status == 413 or (status in _MAY_OVERFLOW and _OVERFLOW.search(json.dumps(body))):
        raise ContextOverflow(f"{text}.")
    if status in _MAY_REFUSE_TOOLS and _ABOUT_TOOLS.search(json.dumps(body)):
        raise ToolsRefused(f"{text}.")
    raise AgentError(f"{text}.")


def read_body(text: str, hide: Callable[[str], str]) -> Any:
    """Return the body as JSON, or as text where it is not JSON; ``hide`` is applied to every string in it."""
    try:
        return _each_text(json.loads(text), hide)
    except (ValueError, RecursionError):
        return hide(text)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_text(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _each_text(item, change) for key, item in value.items()}
    return value


def read_tokens(body: Any) -> Tokens | None:
    """Return the token usage of a response, where it has valid counts."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return None
    counts = [usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)]
    if any(type(count) is not int or not 0 <= count < 2**53 for count in counts):
        return None
    return Tokens(*counts)


def read_reply(body: Any) -> ChatReply:
    """Return the first choice's message.

    A message without text is retried, except where the model did produce output: reasoning until it was cut
    off, or a refusal. That is the model's own failure to act, and counts as an empty reply.
    """
    if not isinstance(body, dict):
        raise RetryableError("The endpoint's answer is not a JSON object")
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        message_text = server_message(body) if "error" in body else ""
        detail = f": {message_text}" if message_text else ""
        raise RetryableError(f"The endpoint's answer holds no choices{detail}")
    reason = choice.get("finish_reason")
    reason = reason if isinstance(reason, str) else None
    thinking = _first_text(message, "reasoning_content", "reasoning")
    content = message.get("content")
    if content is None and (thinking or reason in _NO_TEXT_REASONS or _first_text(message, "refusal")):
        content = _first_text(message, "refusal")
    calls, call_error = _read_calls(message.get("tool_calls"))
    if content is None and (calls or call_error):
        content = ""
    if not isinstance(content, str):
        raise RetryableError(f"The endpoint's reply has no text (content is {type(content).__name__})")
    text = f"<think>\n{thinking.strip()}\n</think>\n\n{content}" if thinking else content
    return ChatReply(
        text=clean_text(text),
        finish_reason=reason and clean_text(reason),
        calls=calls,
        call_error=call_error,
    )


def _read_calls(value: Any) -> tuple[tuple[ToolCall, ...], str]:
    """Return the tool calls of a message, or what is malformed about them."""
    if not value:
        return (), ""
    try:
        calls = Message.from_openai({"role": "assistant", "tool_calls": value}).tool_calls
    except ValueError as error:
        return (), f"The tool call is malformed: {error}."
    return with_ids(
        [
            ToolCall(name=clean_text(c.name), arguments=jsonable(c.arguments), id=clean_text(c.id))
            for c in calls
        ]
    ), ""


def _first_text(message: Mapping[str, Any], *names: str) -> str:
    texts = (message.get(name) for name in names)
    return next((text for text in texts if isinstance(text, str) and text.strip()), "")


def server_message(body: Any) -> str:
    """Return the message of an error body, on one printable line of limited length."""
    value = body
    for _ in range(4):
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, dict):
            value = next((value[k] for k in ("error", "message", "detail", "msg") if value.get(k)), None)
    line = " ".join(value.split()) if isinstance(value, str) else ""
    line = "".join(character if character.isprintable() else "?" for character in line)
    return line.rstrip(".") if len(line) <= MESSAGE_CHARS else line[: MESSAGE_CHARS - 1] + "…"


def retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header, which is a number or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
