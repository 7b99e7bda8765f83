"""Anthropic's messages: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

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
from rollgym.serve.requests import check, convert, make_call, make_request, make_tool, read_fields, shown

HARMLESS = frozenset({"metadata", "service_tier", "cache_control", "inference_geo", "speed"})
REJECTED = {
    "mcp_servers": "only function tools are supported",
    "container": "only function tools are supported",
    "context_management": "edit the history in the client",
    "output_format": "replies are not constrained to a format",
}
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_EMPTY_TEXT = {"type": "text", "text": ""}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Body(msgspec.Struct):
    model: str
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class AnthropicMessages:
    """The dialect of Anthropic's messages."""

    def read(self, body: bytes, history: History) -> DialectRequest:
        """Parse a request; raises `ApiError`."""
        return self._read(body, need_max_tokens=True)

    def read_count(self, body: bytes) -> DialectRequest:
        """Parse a request to count tokens; raises `ApiError`."""
        return self._read(body, need_max_tokens=False)

    def _read(self, body: bytes, need_max_tokens: bool) -> DialectRequest:
        request, _ = read_fields(body, _Body, harmless=HARMLESS, rejected=REJECTED)
        check(not need_max_tokens or request.max_tokens is not None, "max_tokens is missing.", "max_tokens")
        tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ()))
        max_calls, forced = _tool_choice(request.tool_choice, tools)
        ignored: tuple[str, ...] = ()
        if (request.thinking or {}).get("type") not in (None, "disabled"):
            ignored += ("thinking",)
        effort = dict(request.output_config or {})
        if effort.pop("effort", None) is not None:
            ignored += ("output_config",)
        check(not any(effort.values()), "output_config is not supported: leave it out.", "output_config")
        messages = []
        system = _text(request.system or "", "system")
        if system:
            messages.append(Message(role="system", content=system))
        for number, message in enumerate(request.messages):
            messages += _messages(message, f"messages[{number}]")
        chat = make_request(
            model=request.model,
            messages=messages,
            tools=tools,
            max_calls=max_calls,
            forced=forced,
            sampling={name: getattr(request, name) for name in ("temperature", "top_p", "top_k")},
            max_tokens=request.max_tokens,
            stops=request.stop_sequences or (),
            ignored=ignored,
        )
        return DialectRequest(chat=chat, stream=bool(request.stream))

    def response(self, request: DialectRequest, replies: Replies) -> dict[str, Any]:
        """Return a whole message."""
        reply = replies.first
        body = _head(request, replies.id, reply.usage.prompt_tokens, reply.usage.completion_tokens)
        return body | {"content": _blocks(reply), **_ending(reply)}

    def stream(self, request: DialectRequest, head: StreamHead) -> _MessageStream:
        """Return the writer of events."""
        return _MessageStream(request, head)

    def error(self, status: int, message: str, *, code: str | None, param: str | None) -> dict[str, Any]:
        """Return the body of an error response."""
        kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def model_card(self, name: str, created: str) -> dict[str, Any]:
        """Return an entry of the model list."""
        return {"type": "model", "id": name, "display_name": name, "created_at": created}


class _MessageStream:
    """Events of a message: blocks one after the other, of which at most one is open."""

    def __init__(self, request: DialectRequest, head: StreamHead) -> None:
        self._message = _head(request, head.id, head.prompt_tokens, 0)
        self._sent = Sent()
        self._index = -1
        self._open = ""
        """Type of the open block."""

    def start(self) -> Iterator[str]:
        """Yield the start of the message."""
        yield _event("message_start", message=self._message)

    def delta(self, delta: Delta) -> Iterator[str]:
        """Yield further text."""
        self._sent.add(delta)
        if delta.reasoning:
            yield from self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield from self._deltas("thinking_delta", "thinking", delta.reasoning)
        if delta.text:
            yield from self._enter("text", _EMPTY_TEXT)
            yield from self._deltas("text_delta", "text", delta.text)

    def finish(self, replies: Replies) -> Iterator[str]:
        """Yield the rest of the message, its calls and why it ended."""
        reply = replies.first
        reasoning, text = self._sent.rest(reply)
        yield from self.delta(Delta(reasoning=reasoning, text=text))
        if not self._sent.text and not reply.message.tool_calls:
            yield from self._enter("text", _EMPTY_TEXT)
        for call in reply.message.tool_calls:
            yield from self._close()
            yield from self._enter("tool_use", _use(call) | {"input": {}})
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            yield from self._deltas("input_json_delta", "partial_json", arguments)
        yield from self._close()
        usage = {"output_tokens": reply.usage.completion_tokens}
        yield _event("message_delta", delta=_ending(reply), usage=usage)
        yield _event("message_stop")

    def fail(self, status: int, message: str, *, code: str | None, param: str | None) -> Iterator[str]:
        """Yield an error."""
        yield sse(AnthropicMessages().error(status, message, code=code, param=param), "error")

    def _enter(self, kind: str, empty: dict[str, Any]) -> Iterator[str]:
        if self._open != kind:
            yield from self._close()
            self._index, self._open = self._index + 1, kind
            yield _event("content_block_start", index=self._index, content_block=empty)

    def _close(self) -> Iterator[str]:
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""

    def _deltas(self, kind: str, field: str, text: str) -> Iterator[str]:
        for piece in pieces(text):
            yield _event("content_block_delta", index=self._index, delta={"type": kind, field: piece})


def _tool(body: dict[str, Any], where: str) -> ToolSpec:
    kind = body.get("type")
    check(
        kind in (None, "custom"),
        f"{where} has the type {shown(kind)}: only tools of the client, with an input_schema, are supported.",
        where,
    )
    return make_tool(body.get("name"), body.get("description"), body.get("input_schema"), where)


def _tool_choice(
    choice: dict[str, Any] | None, tools: tuple[ToolSpec, ...]
) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of calls to show, and the names of tools one of which must be called."""
    if choice is None:
        return None, ()
    kind = choice.get("type")
    known = kind in ("auto", "none") or kind == "any" or choice.get("name") in [tool.name for tool in tools]
    check(
        known and kind in ("auto", "none", "any", "tool"),
        "tool_choice must have the type auto, none, any, or tool with the name of a tool.",
        "tool_choice",
    )
    check(bool(tools) or kind in ("auto", "none"), "tool_choice needs tools.", "tool_choice")
    most = 0 if kind == "none" else 1 if choice.get("disable_parallel_tool_use") else None
    if kind == "tool":
        return most, (str(choice["name"]),)
    return most, tuple(tool.name for tool in tools) if kind == "any" else ()


def _messages(body: dict[str, Any], where: str) -> list[Message]:
    """Return a message of a request; each result of a tool becomes a separate message."""
    role, content = body.get("role"), body.get("content")
    check(role in ("user", "assistant"), f"{where} has role {shown(role)}: use user or assistant.", where)
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    check(
        isinstance(blocks, list) and all(isinstance(block, dict) for block in blocks),
        f"{where}.content must be text or a list of blocks.",
        where,
    )
    assert isinstance(blocks, list)
    return _of_assistant(blocks, where) if role == "assistant" else _of_user(blocks, where)


def _of_assistant(blocks: list[dict[str, Any]], where: str) -> list[Message]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append(_block_text(block, "text", where))
            case "thinking":
                thoughts.append(_block_text(block, "thinking", where))
            case "tool_use":
                calls.append(make_call(block.get("id"), block.get("name"), block.get("input"), where))
            case kind:
                check(False, f"{where} holds {shown(kind)}: use text, thinking or tool_use.", where)
    return [
        Message(
            role="assistant",
            content="".join(texts),
            reasoning="".join(thoughts),
            tool_calls=tuple(calls),
        )
    ]


def _of_user(blocks: list[dict[str, Any]], where: str) -> list[Message]:
    results: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append(_block_text(block, "text", where))
            case "tool_result":
                check(not texts, f"{where}: put tool_result blocks before text.", where)
                call_id = convert(block.get("tool_use_id"), str, where)
                content = _text(block.get("content") or "", where)
                results.append(Message(role="tool", content=content, tool_call_id=call_id))
            case kind:
                check(False, f"{where} holds {shown(kind)}: only text is supported.", where)
    check(bool(results or texts), f"{where} has no content.", where)
    return [*results, Message(role="user", content="\n".join(texts))] if texts else results


def _text(content: Any, where: str) -> str:
    """Return the text of a string or of text blocks."""
    if isinstance(content, str):
        return clean_text(content)
    check(isinstance(content, list), f"{where} must be text or a list of text blocks.", where)
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        check(kind == "text", f"{where} holds {shown(kind)}: only text is supported.", where)
    return "\n".join(_block_text(block, "text", where) for block in content)


def _block_text(block: dict[str, Any], field: str, where: str) -> str:
    return clean_text(convert(block.get(field), str, f"{where}.{field}"))


def _head(request: DialectRequest, name: str, input_tokens: int, output_tokens: int) -> dict[str, Any]:
    usage = {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": request.chat.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _ending(reply: Reply) -> dict[str, Any]:
    reason = _STOP_REASONS[reply.finish_reason]
    if reply.stop is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop if reason == "stop_sequence" else None}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    message = reply.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.text or not message.tool_calls:
        blocks.append({"type": "text", "text": message.text})
    return blocks + [_use(call) for call in message.tool_calls]


def _use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _event(kind: str, **fields: Any) -> str:
    return sse({"type": kind, **fields}, kind)
