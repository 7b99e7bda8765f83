"""Response bodies in the format of the OpenAI API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from rollgym.serve.requests import ApiError, ChatRequest
from rollgym.serve.session import Reply

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_CHUNK = 24
"""Characters per chunk of a stream."""


def error(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error response."""
    kind = "server_error" if status >= 500 else _KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def api_error(raised: ApiError) -> dict[str, Any]:
    """Return the body of an `ApiError`."""
    return error(raised.status, str(raised), code=raised.code, param=raised.param)


def model_card(name: str, started: float, context: int) -> dict[str, Any]:
    """Return an entry of the model list."""
    return {
        "id": name,
        "object": "model",
        "created": int(started),
        "owned_by": "rollgym",
        "max_model_len": context,
    }


def completion(request: ChatRequest, reply: Reply, name: str) -> dict[str, Any]:
    """Return a whole chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": reply.text, "refusal": None},
        "logprobs": _logprobs(request, reply),
        "finish_reason": reply.finish_reason,
    }
    return _head("chat.completion", request, name) | {"choices": [choice], "usage": _usage(reply)}


def stream(request: ChatRequest, reply: Reply, name: str) -> Iterator[str]:
    """Yield a reply as server-sent events. It was sampled as a whole; only the transport differs."""
    head = _head("chat.completion.chunk", request, name)

    def event(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return _event(head | {"choices": [choice]})

    yield event({"role": "assistant", "content": ""}, logprobs=_logprobs(request, reply))
    for start in range(0, len(reply.text), _CHUNK):
        yield event({"content": reply.text[start : start + _CHUNK]})
    yield event({}, reply.finish_reason)
    if request.usage:
        yield _event(head | {"choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _head(kind: str, request: ChatRequest, name: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.model}


def _usage(reply: Reply) -> dict[str, int]:
    read, written = reply.usage.prompt_tokens, reply.usage.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _logprobs(request: ChatRequest, reply: Reply) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    content = [
        {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        for text, logprob in reply.tokens
    ]
    return {"content": content, "refusal": None}
