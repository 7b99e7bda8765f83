"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from rollgym.core.messages import Message, ToolCall, ToolSpec
from rollgym.core.serialization import clean_text
from rollgym.serve.dialects.base import (
    Delta,
    DialectRequest,
    History,
    Replies,
    Reply,
    Sent,
    StreamHead,
    pieces,
    sse,
)
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
        max_calls, forced = read_tool_choice(request.tool_choice, tools)
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
            forced=forced,
            sampling={name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p")},
            max_tokens=request.max_completion_tokens or request.max_tokens,
            stops=stops,
            seed=request.seed,
            n=request.n,
            logprobs=bool(request.logprobs),
            ignored=ignored,
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
        head = _head("chat.completion", request, replies.id, replies.created)
        return head | {"choices": choices, "usage": _usage(replies)}

    def stream(self, request: DialectRequest, head: StreamHead) -> _ChatStream:
        """Return the writer of chunks."""
        return _ChatStream(request, head)

    def error(self, status: int, message: str, *, code: str | None, param: str | None) -> dict[str, Any]:
        """Return the body of an error response."""
        kind = "server_error" if status >= 500 else _KINDS.get(status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _ChatStream:
    """Chunks of chat completions; those of several replies alternate."""

    def __init__(self, request: DialectRequest, head: StreamHead) -> None:
        self._request = request
        self._head = _head("chat.completion.chunk", request, head.id, head.created)
        if request.usage:
            self._head["usage"] = None
        self._sent = [Sent() for _ in range(request.chat.n)]

    def start(self) -> Iterator[str]:
        """Yield a chunk with the role of each reply."""
        for index in range(len(self._sent)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> Iterator[str]:
        """Yield further text."""
        self._sent[delta.index].add(delta)
        for piece in pieces(delta.reasoning):
            yield self._chunk(delta.index, {"reasoning_content": piece})
        for piece in pieces(delta.text):
            yield self._chunk(delta.index, {"content": piece})

    def finish(self, replies: Replies) -> Iterator[str]:
        """Yield the rest of the replies, their calls and log-probs, and the usage."""
        for index, reply in enumerate(replies.items):
            reasoning, text = self._sent[index].rest(reply)
            yield from self.delta(Delta(index=index, reasoning=reasoning, text=text))
            for number, call in enumerate(reply.message.tool_calls):
                function = {"name": call.name, "arguments": ""}
                start = {"index": number, "id": call.id, "type": "function", "function": function}
                yield self._chunk(index, {"tool_calls": [start]})
                for piece in pieces(json.dumps(call.arguments, ensure_ascii=False)):
                    part = {"index": number, "function": {"arguments": piece}}
                    yield self._chunk(index, {"tool_calls": [part]})
            yield self._chunk(index, {}, _logprobs(self._request, reply), reply.finish_reason)
        if self._request.usage:
            yield sse(self._head | {"choices": [], "usage": _usage(replies)})
        yield "data: [DONE]\n\n"

    def fail(self, status: int, message: str, *, code: str | None, param: str | None) -> Iterator[str]:
        """Yield an error."""
        yield sse(OpenAIChat().error(status, message, code=code, param=param))

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return sse(self._head | {"choices": [choice]})


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
    """Return the number of calls to show, and the names of tools one of which must be called."""
    if choice is None or choice == "auto":
        return None, ()
    if choice == "none":
        return 0, ()
    check(bool(tools), "tool_choice needs tools.", "tool_choice")
    if choice == "required":
        return None, tuple(tool.name for tool in tools)
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    check(
        isinstance(choice, dict)
        and choice.get("type") == "function"
        and name in [tool.name for tool in tools],
        "tool_choice must be none, auto, required or a function of tools.",
        "tool_choice",
    )
    return None, (str(name),)


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


def _head(kind: str, request: DialectRequest, name: str, created: int) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{name}",
        "object": kind,
        "created": created,
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
