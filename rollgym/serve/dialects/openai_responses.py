"""OpenAI's responses: ``POST /v1/responses``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgspec

from rollgym.core.messages import Message, ToolSpec
from rollgym.core.serialization import clean_text
from rollgym.serve.dialects.base import DialectRequest, History, Replies, Reply, pieces, sse
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
        max_calls, unforced = read_tool_choice(request.tool_choice, tools)
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
            sampling={name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p")},
            max_tokens=request.max_output_tokens,
            seed=request.seed,
            logprobs=_LOGPROBS in (request.include or ()),
            ignored=(*ignored, *unforced),
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
        body = _head(request, replies) | {"output": _output(request, replies)}
        reply = replies.first
        if reply.finish_reason == "length":
            body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            body |= {"status": "completed", "completed_at": replies.created}
        return body | {"usage": _usage(reply)}

    def stream(self, request: DialectRequest, replies: Replies) -> Iterator[str]:
        """Yield a response as events."""
        numbers = itertools.count()

        def event(kind: str, **fields: Any) -> str:
            return sse({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        begun = _head(request, replies) | {"output": [], "status": "in_progress", "usage": None}
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        for index, item in enumerate(_output(request, replies)):
            empty = _emptied(item)
            yield event("response.output_item.added", output_index=index, item=empty)
            for kind, fields in _item_events(item):
                yield event(f"response.{kind}", item_id=item["id"], output_index=index, **fields)
            yield event("response.output_item.done", output_index=index, item=item)
        whole = self.response(request, replies)
        yield event(f"response.{whole['status']}", response=whole)

    def error(self, status: int, message: str, *, code: str | None, param: str | None) -> dict[str, Any]:
        """Return the body of an error response."""
        return OpenAIChat().error(status, message, code=code, param=param)


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


def _head(request: DialectRequest, replies: Replies) -> dict[str, Any]:
    return {
        "id": f"resp_{replies.id}",
        "object": "response",
        "created_at": replies.created,
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
        items.append({"id": f"rs_{replies.id}", "type": "reasoning", "summary": [], "content": content})
    if message.text or not message.tool_calls:
        part: dict[str, Any] = {"type": "output_text", "text": message.text, "annotations": []}
        part["logprobs"] = token_logprobs(reply) if request.chat.logprobs else []
        items.append(
            {
                "id": f"msg_{replies.id}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
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


def _emptied(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item before its first delta."""
    changes: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
    return item | changes | ({"status": "in_progress"} if "status" in item else {})


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    match item["type"]:
        case "function_call":
            for piece in pieces(item["arguments"]):
                yield "function_call_arguments.delta", {"delta": piece}
            yield (
                "function_call_arguments.done",
                {"name": item["name"], "arguments": item["arguments"]},
            )
        case "reasoning":
            text = item["content"][0]["text"]
            for piece in pieces(text):
                yield "reasoning_text.delta", {"content_index": 0, "delta": piece}
            yield "reasoning_text.done", {"content_index": 0, "text": text}
        case _:
            part = item["content"][0]
            empty = part | {"text": "", "logprobs": []}
            yield "content_part.added", {"content_index": 0, "part": empty}
            for number, piece in enumerate(pieces(part["text"])):
                # All log-probs come with the first piece: tokens and pieces have different borders.
                logprobs = part["logprobs"] if number == 0 else []
                yield "output_text.delta", {"content_index": 0, "delta": piece, "logprobs": logprobs}
            done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            yield "output_text.done", done
            yield "content_part.done", {"content_index": 0, "part": part}


def _usage(reply: Reply) -> dict[str, Any]:
    prompt, completion = reply.usage.prompt_tokens, reply.usage.completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
