"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from rollgym.core.messages import Message, ToolCall, ToolSpec
from rollgym.core.serialization import clean_text
from rollgym.serve.dialects.base import DialectRequest, History, Replies, Reply, pieces, sse
from rollgym.serve.requests import (
    ApiError,
    check,
    convert,
    make_call,
    make_request,
    make_tool,
    read_fields,
    shown,
)

_ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"
}  # fmt: skip
HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prediction",
        "prompt_cache_retention",
    }
)  # fmt: skip
IGNORED = frozenset({"reasoning_effort", "reasoning", "verbosity"})
REJECTED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "logit_bias": "replies are sampled from the model's own distribution",
    "frequency_penalty": "replies are sampled from the model's own distribution",
    "presence_penalty": "replies are sampled from the model's own distribution",
    "repetition_penalty": "replies are sampled from the model's own distribution",
    "audio": "only text is supported",
    "web_search_options": "only function tools are supported",
}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str
    messages: list[dict[str, Any]]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    modalities: list[str] | None = None


class OpenAIChat:
    """The dialect of OpenAI's chat completions."""

    def read(self, body: bytes, history: History) -> DialectRequest:
        """Parse a request; raises `ApiError`."""
        request, ignored = read_fields(body, _Body, harmless=HARMLESS, ignored=IGNORED, rejected=REJECTED)
        _check_output(request.response_format, request.top_logprobs, request.modalities)
        tools = read_tools(request.tools or ())
        max_calls, unforced = read_tool_choice(request.tool_choice, tools)
        if request.parallel_tool_calls is False:
            max_calls = 1 if max_calls is None else max_calls
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(request, name)
            check(value is None or value >= 1, f"{name} must be at least 1, not {value}.", name)
        stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
        chat = make_request(
            model=request.model,
            messages=[read_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)],
            tools=tools,
            max_calls=max_calls,
            sampling={name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p")},
            max_tokens=request.max_completion_tokens or request.max_tokens,
            stops=stops,
            seed=request.seed,
            n=request.n,
            logprobs=bool(request.logprobs),
            ignored=(*ignored, *unforced),
        )
        usage = bool(request.stream_options and request.stream_options.include_usage)
        return DialectRequest(chat=chat, stream=bool(request.stream), usage=usage)

    def response(self, request: DialectRequest, replies: Replies) -> dict[str, Any]:
        """Return a whole chat completion."""
        choices = [
            {
                "index": index,
                "message": _message(reply),
                "logprobs": _logprobs(request, reply),
                "finish_reason": reply.finish_reason,
            }
            for index, reply in enumerate(replies.items)
        ]
        return _head("chat.completion", request, replies) | {"choices": choices, "usage": _usage(replies)}

    def stream(self, request: DialectRequest, replies: Replies) -> Iterator[str]:
        """Yield the replies as chunks, one reply after the other."""
        head = _head("chat.completion.chunk", request, replies)
        more: dict[str, Any] = {"usage": None} if request.usage else {}
        for index, reply in enumerate(replies.items):
            for delta, reason in _deltas(reply):
                logprobs = _logprobs(request, reply) if "role" in delta else None
                choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
                yield sse(head | {"choices": [choice]} | more)
        if request.usage:
            yield sse(head | {"choices": [], "usage": _usage(replies)})
        yield "data: [DONE]\n\n"

    def error(self, status: int, message: str, *, code: str | None, param: str | None) -> dict[str, Any]:
        """Return the body of an error response."""
        kind = "server_error" if status >= 500 else _KINDS.get(status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def read_tools(bodies: Any) -> tuple[ToolSpec, ...]:
    """Return the tools of a request."""
    tools = []
    for number, tool in enumerate(bodies):
        where, function = f"tools[{number}]", tool.get("function")
        check(
            tool.get("type") == "function" and isinstance(function, dict),
            f"{where} must have the type function and a function, not {shown(tool.get('type'))}.",
            where,
        )
        tools.append(
            make_tool(function.get("name"), function.get("description"), function.get("parameters"), where)
        )
    return tuple(tools)


def read_tool_choice(choice: Any, tools: tuple[ToolSpec, ...]) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of calls to show, and the fields without effect: the model is not forced to call."""
    if choice is None or choice == "auto":
        return None, ()
    if choice == "none":
        return 0, ()
    check(bool(tools), "tool_choice needs tools.", "tool_choice")
    if choice == "required":
        return None, ("tool_choice",)
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    check(
        isinstance(choice, dict)
        and choice.get("type") == "function"
        and name in [tool.name for tool in tools],
        "tool_choice must be none, auto, required or a function of tools.",
        "tool_choice",
    )
    return None, ("tool_choice",)


def read_message(body: dict[str, Any], where: str) -> Message:
    """Return a message of a request."""
    role = _ROLES.get(body["role"]) if isinstance(body.get("role"), str) else None
    if role is None:
        raise ApiError(
            400,
            f"{where} has role {shown(body.get('role'))}: use system, user, assistant or tool.",
            code="invalid_value",
            param=where,
        )
    check(not body.get("function_call"), f"{where} has a function_call: use tool_calls.", where)
    check(not body.get("audio"), f"{where} holds audio: only text is supported.", where)
    bodies = body.get("tool_calls") or ()
    check(isinstance(bodies, (list, tuple)), f"{where}.tool_calls must be a list.", where)
    check(
        role == "assistant" or not bodies, f"{where} has tool calls: only the assistant calls tools.", where
    )
    content = read_content(body.get("content"), where)
    check(content is not None or role == "assistant", f"{where} has no content.", where)
    reasoning = body.get("reasoning_content") or body.get("reasoning") or ""
    return Message(
        role=role,  # type: ignore[arg-type]
        content=content or "",
        reasoning=clean_text(reasoning) if role == "assistant" and isinstance(reasoning, str) else "",
        tool_calls=tuple(_call(call, where) for call in bodies),
        tool_call_id=convert(body.get("tool_call_id") or "", str, where) if role == "tool" else "",
        name=convert(body.get("name") or "", str, where) if role == "tool" else "",
    )


def read_content(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str | None:
    """Return the text of a message; ``None`` where it has none."""
    if content is None:
        return None
    if isinstance(content, str):
        return clean_text(content)
    check(isinstance(content, list), f"{where}.content: Expected `str` or `array`.", where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        check(kind in kinds, f"{where} holds {shown(kind)}: only text is supported.", where)
        texts.append(convert(part.get("text"), str, where))
    return clean_text("".join(texts))


def _call(body: Any, where: str) -> ToolCall:
    function = body.get("function") if isinstance(body, dict) else None
    check(isinstance(function, dict), f"{where}: a tool call needs a function.", where)
    assert isinstance(function, dict)
    return make_call(body.get("id"), function.get("name"), function.get("arguments"), where)


def _check_output(form: Any, top_logprobs: int | None, modalities: list[str] | None) -> None:
    plain = isinstance(form, dict) and form.get("type") == "text"
    check(
        not form or plain,
        "response_format is not supported: replies are not constrained to a format. Leave it out.",
        "response_format",
    )
    check(
        not top_logprobs, "top_logprobs is not supported: only the sampled token's is known.", "top_logprobs"
    )
    check(modalities in (None, [], ["text"]), "modalities must be text.", "modalities")


def _message(reply: Reply) -> dict[str, Any]:
    message = reply.message
    body: dict[str, Any] = {
        "role": "assistant",
        "content": message.text if message.text or not message.tool_calls else None,
        "refusal": None,
    }
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [call.to_openai() for call in message.tool_calls]
    return body


def _deltas(reply: Reply) -> Iterator[tuple[dict[str, Any], str | None]]:
    message = reply.message
    yield {"role": "assistant", "content": ""}, None
    for piece in pieces(message.reasoning):
        yield {"reasoning_content": piece}, None
    for piece in pieces(message.text):
        yield {"content": piece}, None
    for index, call in enumerate(message.tool_calls):
        function = {"name": call.name, "arguments": ""}
        yield (
            {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]},
            None,
        )
        for piece in pieces(json.dumps(call.arguments, ensure_ascii=False)):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, None
    yield {}, reply.finish_reason


def _head(kind: str, request: DialectRequest, replies: Replies) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{replies.id}",
        "object": kind,
        "created": replies.created,
        "model": request.chat.model,
    }


def _usage(replies: Replies) -> dict[str, int]:
    prompt = replies.first.usage.prompt_tokens
    completion = sum(reply.usage.completion_tokens for reply in replies.items)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _logprobs(request: DialectRequest, reply: Reply) -> dict[str, Any] | None:
    if not request.chat.logprobs:
        return None
    return {"content": token_logprobs(reply), "refusal": None}


def token_logprobs(reply: Reply) -> list[dict[str, Any]]:
    """Return the log-prob of each sampled token."""
    return [
        {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        for text, logprob in reply.tokens
    ]
