"""Clients in plain HTTP: the same conversation in each dialect, whole and as a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

from rollgym.core.messages import Message, ToolCall, ToolSpec

DIALECTS = ("chat", "responses", "messages")
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}


async def ask(
    http: httpx.AsyncClient,
    dialect: str,
    session: str,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    *,
    stream: bool = False,
    **more: Any,
) -> Message:
    """Send a conversation; the reply."""
    body = BODIES[dialect](messages, tools) | {"model": "policy", "stream": stream} | more
    answer = await http.post(f"/session/{session}/v1/{PATHS[dialect]}", json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        assert answer.headers["content-type"].startswith("text/event-stream")
        return STREAMS[dialect](events(answer.text))
    return WHOLE[dialect](answer.json())


def events(text: str) -> list[dict[str, Any]]:
    """The data of server-sent events; their names must be the types in the data."""
    values = []
    for event in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.splitlines())
        if lines and lines["data"] != "[DONE]":
            values.append(json.loads(lines["data"]))
            assert lines.get("event") == values[-1].get("type")
    return values


def chat_body(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [message.to_openai() for message in messages]}
    return body | ({"tools": [tool.to_openai() for tool in tools]} if tools else {})


def chat_whole(body: dict[str, Any]) -> Message:
    (choice,) = body["choices"]
    message = Message.from_openai(choice["message"])
    assert (choice["finish_reason"] == "tool_calls") == bool(message.tool_calls)
    return message


def chat_stream(values: list[dict[str, Any]]) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for value in values:
        for choice in value["choices"]:
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append(call)
                else:
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    return chat_whole({"choices": [{"message": message, "finish_reason": reason}]})


def responses_body(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "tool":
            output = {"call_id": message.tool_call_id, "output": message.text}
            items.append({"type": "function_call_output", **output})
            continue
        if message.reasoning:
            content = [{"type": "reasoning_text", "text": message.reasoning}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        if message.text:
            kind = "output_text" if message.role == "assistant" else "input_text"
            items.append({"role": message.role, "content": [{"type": kind, "text": message.text}]})
        for call in message.tool_calls:
            arguments = json.dumps(call.arguments)
            head = {"type": "function_call", "call_id": call.id}
            items.append({**head, "name": call.name, "arguments": arguments})
    flat = [{"type": "function", **tool.to_openai()["function"]} for tool in tools]
    return {"input": items} | ({"tools": flat} if tools else {})


def responses_whole(body: dict[str, Any]) -> Message:
    assert body["status"] == "completed"
    text, reasoning, calls = "", "", []
    for item in body["output"]:
        if item["type"] == "message":
            text += item["content"][0]["text"]
        elif item["type"] == "reasoning":
            reasoning += item["content"][0]["text"]
        else:
            arguments = json.loads(item["arguments"])
            calls.append(ToolCall(id=item["call_id"], name=item["name"], arguments=arguments))
    return Message(role="assistant", content=text, reasoning=reasoning, tool_calls=tuple(calls))


def responses_stream(values: list[dict[str, Any]]) -> Message:
    assert [value["sequence_number"] for value in values] == list(range(len(values)))
    whole = responses_whole(values[-1]["response"])
    texts = "".join(value["delta"] for value in values if value["type"].endswith("output_text.delta"))
    assert texts == whole.text
    done = [value["item"] for value in values if value["type"].endswith("output_item.done")]
    assert done == values[-1]["response"]["output"]
    for index, item in enumerate(done):
        deltas = [
            value["delta"]
            for value in values
            if value["type"].endswith("arguments.delta") and value["output_index"] == index
        ]
        assert "".join(deltas) == item.get("arguments", "")
    return whole


def messages_body(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> dict[str, Any]:
    bodies: list[dict[str, Any]] = []
    system = "".join(message.text for message in messages if message.role == "system")
    for message in messages:
        if message.role == "system":
            continue
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
        if message.role == "tool":
            result = {"tool_use_id": message.tool_call_id, "content": message.text}
            blocks.append({"type": "tool_result", **result})
        elif message.text:
            blocks.append({"type": "text", "text": message.text})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
            for call in message.tool_calls
        ]
        role = "assistant" if message.role == "assistant" else "user"
        if bodies and bodies[-1]["role"] == role:
            bodies[-1]["content"] += blocks
        else:
            bodies.append({"role": role, "content": blocks})
    flat = [
        {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}
        for tool in tools
    ]
    body: dict[str, Any] = {"messages": bodies, "max_tokens": 10_000}
    return body | ({"system": system} if system else {}) | ({"tools": flat} if tools else {})


def messages_whole(body: dict[str, Any]) -> Message:
    text, reasoning, calls = "", "", []
    for block in body["content"]:
        text += block.get("text", "")
        reasoning += block.get("thinking", "")
        if block["type"] == "tool_use":
            calls.append(ToolCall(id=block["id"], name=block["name"], arguments=block["input"]))
    assert (body["stop_reason"] == "tool_use") == bool(calls)
    return Message(role="assistant", content=text, reasoning=reasoning, tool_calls=tuple(calls))


def messages_stream(values: list[dict[str, Any]]) -> Message:
    blocks: list[dict[str, Any]] = []
    body: dict[str, Any] = {}
    for value in values:
        match value["type"]:
            case "message_start":
                body = value["message"]
            case "content_block_start":
                assert value["index"] == len(blocks)
                blocks.append(value["content_block"] | {"json": ""})
            case "content_block_delta":
                delta, block = value["delta"], blocks[value["index"]]
                for kind, name in (("text_delta", "text"), ("thinking_delta", "thinking")):
                    if delta["type"] == kind:
                        block[name] += delta[name]
                block["json"] += delta.get("partial_json", "")
            case "content_block_stop":
                block = blocks[value["index"]]
                if block["type"] == "tool_use":
                    block["input"] = json.loads(block["json"])
            case "message_delta":
                body |= value["delta"]
    assert values[-1]["type"] == "message_stop"
    return messages_whole(body | {"content": blocks})


BODIES = {"chat": chat_body, "responses": responses_body, "messages": messages_body}
WHOLE = {"chat": chat_whole, "responses": responses_whole, "messages": messages_whole}
STREAMS = {"chat": chat_stream, "responses": responses_stream, "messages": messages_stream}
