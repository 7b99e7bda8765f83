"""OpenAI's responses: ``POST /v1/responses``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgspec

from rollgym.core.messages import Message, ToolSpec
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
from rollgym.serve.dialects.openai_chat import OpenAIChat, read_content, read_tool_choice, token_logprobs
from rollgym.serve.requests import check, convert, make_call, make_request, make_tool, read_fields, shown

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "stream_options",
    }
)  # fmt: skip
IGNORED = frozenset({"reasoning"})
REJECTED = {
    "background": "leave it out and wait for the response",
    "conversation": "use previous_response_id, or send all items",
    "prompt": "send the text itself",
    "max_tool_calls": "limit the calls in the client",
    "context_management": "edit the history in the client",
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"
_REASONING = "reasoning.encrypted_content"


_TEXT_PART: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


class _Body(msgspec.Struct):
    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    text: dict[str, Any] | None = None


class OpenAIResponses:
    """The dialect of OpenAI's responses."""

    def read(self, body: bytes, history: History) -> DialectRequest:
        """Parse a request; raises `ApiError`."""
        request, ignored = read_fields(body, _Body, harmless=HARMLESS, ignored=IGNORED, rejected=REJECTED)
        ignored += _check_output(request)
        tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ()))
        max_calls, forced = read_tool_choice(request.tool_choice, tools)
        if request.parallel_tool_calls is False:
            max_calls = 1 if max_calls is None else max_calls
        earlier = list(history(request.previous_response_id)) if request.previous_response_id else []
        messages = (*earlier, *_items(request.input))
        system = (
            [Message(role="system", content=clean_text(request.instructions))] if request.instructions else []
        )
        chat = make_request(
            model=request.model,
            messages=[*system, *messages],
            tools=tools,
            max_calls=max_calls,
            forced=forced,
            sampling={name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p")},
            max_tokens=request.max_output_tokens,
            seed=request.seed,
            logprobs=_LOGPROBS in (request.include or ()),
            ignored=ignored,
        )
        echo = {
            "instructions": request.instructions,
            "previous_response_id": request.previous_response_id,
            "tools": request.tools or [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_output_tokens": request.max_output_tokens,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "metadata": {},
        }
        return DialectRequest(chat=chat, stream=bool(request.stream), echo=echo, messages=messages)

    def response(self, request: DialectRequest, replies: Replies) -> dict[str, Any]:
        """Return a whole response."""
        body = _head(request, replies.id, replies.created) | {"output": _output(request, replies)}
        reply = replies.first
        if reply.finish_reason == "length":
            body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            body |= {"status": "completed", "completed_at": replies.created}
        return body | {"usage": _usage(reply)}

    def stream(self, request: DialectRequest, head: StreamHead) -> _ResponseStream:
        """Return the writer of events."""
        return _ResponseStream(request, head)

    def error(self, status: int, message: str, *, code: str | None, param: str | None) -> dict[str, Any]:
        """Return the body of an error response."""
        return OpenAIChat().error(status, message, code=code, param=param)


class _ResponseStream:
    """Events of a response: items one after the other, of which at most one is open."""

    def __init__(self, request: DialectRequest, head: StreamHead) -> None:
        self._request, self._id = request, head.id
        self._response = _head(request, head.id, head.created)
        self._numbers = itertools.count()
        self._sent = Sent()
        self._index = -1
        self._open: dict[str, Any] = {}
        """The open item, as it was added."""

    def start(self) -> Iterator[str]:
        """Yield the start of the response."""
        begun = self._response | {"output": [], "status": "in_progress", "usage": None}
        yield self._event("created", response=begun)
        yield self._event("in_progress", response=begun)

    def delta(self, delta: Delta) -> Iterator[str]:
        """Yield further text."""
        self._sent.add(delta)
        if delta.reasoning:
            yield from self._enter(_reasoning_item(self._id))
            for piece in pieces(delta.reasoning):
                yield self._of_item("reasoning_text.delta", content_index=0, delta=piece)
        if delta.text:
            if self._open.get("type") == "reasoning":
                done = [{"type": "reasoning_text", "text": self._sent.reasoning}]
                yield from self._close(self._open | {"content": done})
            yield from self._enter(_message_item(self._id))
            for piece in pieces(delta.text):
                yield self._of_item("output_text.delta", content_index=0, delta=piece, logprobs=[])

    def finish(self, replies: Replies) -> Iterator[str]:
        """Yield the rest of the items, the calls, and the whole response."""
        reasoning, text = self._sent.rest(replies.first)
        items = _output(self._request, replies)
        yield from self.delta(Delta(reasoning=reasoning))
        if self._open.get("type") == "reasoning":
            yield from self._close(items[0])
        yield from self.delta(Delta(text=text))
        for item in items[self._index + (not self._open) :]:
            if item["type"] == "function_call":
                yield from self._enter(item | {"arguments": "", "status": "in_progress"})
                for piece in pieces(item["arguments"]):
                    yield self._of_item("function_call_arguments.delta", delta=piece)
            else:
                yield from self._enter(_message_item(self._id))  # empty unless it is open
            yield from self._close(item)
        whole = OpenAIResponses().response(self._request, replies)
        yield self._event(whole["status"], response=whole)

    def fail(self, status: int, message: str, *, code: str | None, param: str | None) -> Iterator[str]:
        """Yield an error."""
        fields = {"code": code, "message": message, "param": param}
        yield sse({"type": "error", "sequence_number": next(self._numbers), **fields}, "error")

    def _enter(self, item: dict[str, Any]) -> Iterator[str]:
        if not self._open:
            self._index, self._open = self._index + 1, item
            yield self._event("output_item.added", output_index=self._index, item=item)
            if item["type"] == "message":
                yield self._of_item("content_part.added", content_index=0, part=_TEXT_PART)

    def _close(self, item: dict[str, Any]) -> Iterator[str]:
        """Yield the end of the open item, which is complete now."""
        match item["type"]:
            case "function_call":
                fields = {"name": item["name"], "arguments": item["arguments"]}
                yield self._of_item("function_call_arguments.done", **fields)
            case "reasoning":
                yield self._of_item("reasoning_text.done", content_index=0, text=item["content"][0]["text"])
            case _:
                (part,) = item["content"]
                # With the whole text: tokens and pieces of a stream have different borders.
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._of_item("output_text.done", content_index=0, **done)
                yield self._of_item("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", output_index=self._index, item=item)
        self._open = {}

    def _of_item(self, kind: str, **fields: Any) -> str:
        return self._event(kind, item_id=self._open["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        name = f"response.{kind}"
        return sse({"type": name, "sequence_number": next(self._numbers), **fields}, name)


def _check_output(request: _Body) -> tuple[str, ...]:
    """Check the fields that shape the output; return those without effect."""
    text = dict(request.text or {})
    form, verbosity = text.pop("format", None), text.pop("verbosity", None)
    plain = form is None or (isinstance(form, dict) and form.get("type") == "text")
    check(plain and not text, "text.format must be text: replies are not constrained to a format.", "text")
    check(request.truncation in (None, "disabled"), "truncation must be disabled.", "truncation")
    check(
        not request.top_logprobs,
        "top_logprobs is not supported: only the sampled token's is known.",
        "top_logprobs",
    )
    others = [name for name in request.include or () if name not in (_LOGPROBS, _REASONING)]
    check(not others, f"include holds {shown(others[:1])}, which is not supported.", "include")
    ignored = ("text.verbosity",) if verbosity is not None else ()
    return (*ignored, "include") if _REASONING in (request.include or ()) else ignored


def _tool(body: dict[str, Any], where: str) -> ToolSpec:
    kind = body.get("type")
    check(
        kind == "function", f"{where} has the type {shown(kind)}: only function tools are supported.", where
    )
    return make_tool(body.get("name"), body.get("description"), body.get("parameters"), where)


def _items(given: str | list[dict[str, Any]]) -> Iterator[Message]:
    if isinstance(given, str):
        yield Message(role="user", content=clean_text(given))
        return
    for number, item in enumerate(given):
        yield _item(item, f"input[{number}]")


def _item(item: dict[str, Any], where: str) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        role = _ROLES.get(item["role"]) if isinstance(item.get("role"), str) else None
        check(
            role is not None,
            f"{where} has role {shown(item.get('role'))}: use system, user or assistant.",
            where,
        )
        content = read_content(item.get("content"), where, _TEXTS)
        check(content is not None, f"{where} has no content.", where)
        return Message(role=role, content=content or "")  # type: ignore[arg-type]
    if kind == "function_call":
        call = make_call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
        return Message(role="assistant", tool_calls=(call,))
    if kind == "function_call_output":
        output = read_content(item.get("output"), where, _TEXTS)
        check(output is not None, f"{where} has no output.", where)
        return Message(
            role="tool", content=output or "", tool_call_id=convert(item.get("call_id"), str, where)
        )
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        text = read_content(parts, where, ("reasoning_text", "summary_text"))
        return Message(role="assistant", reasoning=text or "")
    check(
        False,
        f"{where} has the type {shown(kind)}: use message, function_call, function_call_output or reasoning.",
        where,
    )
    raise AssertionError


def _head(request: DialectRequest, name: str, created: int) -> dict[str, Any]:
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": created,
        "model": request.chat.model,
        "error": None,
        "incomplete_details": None,
        **request.echo,
    }


def _output(request: DialectRequest, replies: Replies) -> list[dict[str, Any]]:
    reply, message = replies.first, replies.first.message
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if message.reasoning:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append(_reasoning_item(replies.id) | {"content": content})
    if message.text or not message.tool_calls:
        part = _TEXT_PART | {"text": message.text}
        part["logprobs"] = token_logprobs(reply) if request.chat.logprobs else []
        items.append(_message_item(replies.id) | {"status": status, "content": [part]})
    for number, call in enumerate(message.tool_calls):
        items.append(
            {
                "id": f"fc_{replies.id}_{number}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
                "status": "completed",
            }
        )
    return items


def _reasoning_item(name: str) -> dict[str, Any]:
    return {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": []}


def _message_item(name: str) -> dict[str, Any]:
    item = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": "in_progress"}
    return item | {"content": []}


def _usage(reply: Reply) -> dict[str, Any]:
    prompt, completion = reply.usage.prompt_tokens, reply.usage.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
