"""The parts of a finished reply that a client sees; `rollgym.serve.partial_reply` is for unfinished ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from rollgym.chat import Conversation
from rollgym.core.messages import Message
from rollgym.core.types import Usage
from rollgym.engines.base import Generation
from rollgym.serve.dialects.base import Reply
from rollgym.serve.generation import find_stop
from rollgym.serve.requests import ChatRequest

_ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


def visible_reply(
    request: ChatRequest,
    conversation: Conversation,
    whole: str,
    generation: Generation,
    *,
    name: str,
    begun: Sequence[int] = (),
) -> Reply:
    """Return a reply without stop strings, and with the calls that the request asks for.

    Args:
        request: The request.
        conversation: The conversation, whose last message is the reply.
        whole: The text of the reply without special tokens.
        generation: The sampled reply.
        name: Unique name of the reply, from which the ids of its calls are made.
        begun: Ids with which the reply starts, though they are not sampled.
    """
    codec = conversation.template.codec
    message, parsed = conversation.last_message, conversation.last_parsed
    hide_calls = request.max_calls == 0 and bool(message.tool_calls)
    if not parsed.in_parts or (hide_calls and parsed.rest == conversation.reply_text):
        message = Message(role="assistant", content=whole)
    elif hide_calls:
        message = replace(message, content=parsed.rest.strip())
    start = codec.decode(begun, special=False)
    sampled = whole.removeprefix(start)
    calls = tuple(
        replace(call, id=_call_id(f"{name}/{index}"))
        for index, call in enumerate(message.tool_calls[: request.max_calls])
    )
    reason = generation.finish_reason
    texts = (codec.decode([token_id]) for token_id in generation.token_ids)
    return Reply(
        message=replace(
            message,
            content=_until(request.stops, message.text, start),
            reasoning=_until(request.stops, message.reasoning),
            tool_calls=calls,
        ),
        finish_reason="tool_calls" if calls and reason == "stop" else reason,
        stop=min((stop for stop in request.stops if stop in sampled), key=sampled.index, default=None),
        tokens=tuple(zip(texts, generation.logprobs, strict=True)) if request.logprobs else (),
        usage=Usage(completion_tokens=len(generation.token_ids)),
    )


def _until(stops: Sequence[str], text: str, begun: str = "") -> str:
    """Return a text up to the first stop string, which does not count in what the reply began with."""
    start = len(begun) if text.startswith(begun) else 0
    return text[:start] + text[start:][: find_stop(text[start:], stops)]


def _call_id(name: str) -> str:
    """Return an id for a tool call: nine letters and digits, which every chat template accepts."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return "".join(_ID_LETTERS[number // 36**place % 36] for place in range(9))
