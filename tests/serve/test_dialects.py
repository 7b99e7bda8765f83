"""What each dialect accepts, reports as ignored and rejects, and the form of its errors."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from dialect_wire import DIALECTS, PATHS, ask, events

from rollgym.core.errors import AgentError
from rollgym.core.messages import Message
from rollgym.serve.dialects import AnthropicMessages, OpenAIChat, OpenAIResponses
from rollgym.serve.requests import ApiError

Serving = Callable[..., Any]
TEXT = "@ F F F\nF H F H"
READERS: dict[str, Any] = {
    "chat": OpenAIChat(),
    "responses": OpenAIResponses(),
    "messages": AnthropicMessages(),
}
CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": TEXT}]}
GOOD: dict[str, dict[str, Any]] = {
    "chat": CHAT | {"max_tokens": 4},
    "responses": {"model": "policy", "input": TEXT, "max_output_tokens": 4},
    "messages": CHAT | {"max_tokens": 4},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}


def read(dialect: str, **changes: Any) -> Any:
    return READERS[dialect].read(json.dumps(GOOD[dialect] | changes).encode(), lambda response_id: ())


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"user": "me", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True}),
    ("chat", {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "functions": None}),
    ("chat", {"response_format": {"type": "text"}, "top_logprobs": 0, "modalities": ["text"]}),
    ("chat", {"service_tier": "auto", "stream_options": {"include_usage": True}, "stop": None}),
    ("responses", {"store": True, "metadata": {}, "truncation": "disabled", "background": False}),
    ("responses", {"text": {"format": {"type": "text"}}, "include": [], "parallel_tool_calls": True}),
    ("messages", {"metadata": {"user_id": "me"}, "thinking": {"type": "disabled"}, "service_tier": "auto"}),
    ("messages", {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}),
    ("messages", user([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}])),
]


@pytest.mark.parametrize(("dialect", "changes"), ACCEPTED)
def test_fields_that_cannot_change_the_reply_are_accepted(dialect: str, changes: dict[str, Any]) -> None:
    assert read(dialect, **changes).chat.ignored == ()


@pytest.mark.parametrize(
    ("dialect", "changes", "ignored"),
    [
        ("chat", {"reasoning_effort": "high", "verbosity": "low"}, {"reasoning_effort", "verbosity"}),
        ("responses", {"reasoning": {"effort": "low"}}, {"reasoning"}),
        (
            "responses",
            {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}},
            {"include", "text.verbosity"},
        ),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking"}),
        ("messages", {"output_config": {"effort": "high"}}, {"output_config"}),
    ],
)
def test_wishes_that_cannot_be_granted_are_reported(dialect: str, changes: Any, ignored: set[str]) -> None:
    assert set(read(dialect, **changes).chat.ignored) == ignored


REJECTED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format is not supported"),
    ("chat", {"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
    ("chat", {"logit_bias": {"5": -100}}, "logit_bias is not supported"),
    ("chat", {"top_logprobs": 5, "logprobs": True}, "top_logprobs is not supported"),
    ("chat", {"guided_json": {}, "x": 1}, "not a field that this endpoint knows"),
    ("chat", {"functions": [{}]}, "use tools"),
    ("chat", {"modalities": ["audio"]}, "modalities must be text"),
    ("chat", {"tools": [{"type": "custom", "custom": {}}]}, "tools[0] must have the type function"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "needs a name"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "'f' twice"),
    (
        "chat",
        {"tool_choice": "sometimes", "tools": [{"type": "function", "function": {"name": "f"}}]},
        "tool_choice must",
    ),
    ("chat", user([{"type": "image_url", "image_url": {"url": "x"}}]), "only text is supported"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "must have the role user or tool"),
    ("chat", {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "only the assistant"),
    (
        "chat",
        {
            "messages": [
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c2", "content": "x"},
            ]
        },
        "with the id 'c2'",
    ),
    (
        "chat",
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{"}}],
                }
            ]
        },
        "must be JSON",
    ),
    ("responses", {"tools": [{"type": "web_search"}]}, "only function tools are supported"),
    ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format must be text"),
    ("responses", {"background": True}, "background is not supported"),
    ("responses", {"conversation": "c"}, "use previous_response_id"),
    ("responses", {"truncation": "auto"}, "truncation must be disabled"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "has the type 'item_reference'"),
    (
        "responses",
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "only text is supported",
    ),
    ("responses", {"input": []}, "last message must have the role user or tool"),
    ("messages", {"max_tokens": None}, "max_tokens is missing"),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only tools of the client"),
    ("messages", {"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ("messages", user([{"type": "image", "source": {}}]), "only text is supported"),
    (
        "messages",
        user([{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "c1"}]),
        "tool_result blocks before",
    ),
    ("messages", user([]), "has no content"),
    ("messages", {"messages": [{"role": "system", "content": "x"}]}, "has role 'system'"),
    ("messages", {"messages": [{"role": "assistant", "content": [USE]}]}, "must have the role user or tool"),
    ("messages", {"stop_sequences": [""]}, "empty text"),
    ("messages", {"temperature": 3}, "temperature must be from 0 to 2"),
]


@pytest.mark.parametrize(("dialect", "changes", "message"), REJECTED)
def test_what_would_change_the_reply_is_rejected(dialect: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as raised:
        read(dialect, **changes)
    assert raised.value.status == 400
    assert message in str(raised.value)
    assert str(raised.value).endswith(".")


def test_the_same_conversation_is_the_same_in_every_dialect() -> None:
    chat = read(
        "chat",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": "I go.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ],
    )
    responses = read(
        "responses",
        instructions="Be brief.",
        input=[
            {"role": "user", "content": "Go."},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I go."}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        ],
    )
    messages = read(
        "messages",
        system="Be brief.",
        messages=[
            {"role": "user", "content": "Go."},
            {"role": "assistant", "content": [{"type": "text", "text": "I go."}, USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "ok"}]},
        ],
    )
    assert chat.chat.messages == responses.chat.messages == messages.chat.messages
    assert chat.chat.system == responses.chat.system == messages.chat.system == "Be brief."
    assert chat.chat.keys == responses.chat.keys == messages.chat.keys
    assert chat.chat.messages[-1] == Message(role="tool", content="ok", tool_call_id="c1", name="f")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_errors_have_the_form_of_the_dialect(serving: Serving, dialect: str) -> None:
    async def run() -> None:
        async with serving(api_key="k") as place:
            post, path, key = place.http.post, f"/v1/{PATHS[dialect]}", {"x-api-key": "k"}

            async def fail() -> None:
                raise AgentError("The engine is away.")

            place.spy.before = fail
            answers = {
                400: await post(path, json={"model": "policy"}, headers=key),
                401: await post(path, json=GOOD[dialect]),
                404: await post(path, json=GOOD[dialect] | {"model": "x"}, headers=key),
                503: await post(path, json=GOOD[dialect], headers=key),
            }
            kinds = ["invalid_request_error", "authentication_error", "not_found_error"]
            for (status, answer), kind in zip(answers.items(), kinds, strict=False):
                assert answer.status_code == status, answer.text
                error = answer.json()["error"]
                assert (error["type"], error["message"][-1]) == (kind, ".")
                assert (answer.json().get("type") == "error") == (dialect == "messages")
            kind = "overloaded_error" if dialect == "messages" else "server_error"
            assert answers[503].json()["error"]["type"] == kind

    asyncio.run(run())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_plain_conversation_in_each_dialect(serving: Serving, dialect: str) -> None:
    """A real model; whole and as a stream, the same seed gives the same reply, and a reply is continued."""

    async def run() -> None:
        async with serving(temperature=0.0) as place:
            texts = []
            limit = {"max_output_tokens" if dialect == "responses" else "max_tokens": 30}
            for stream in (False, True):
                said = [Message(role="system", content="Walk."), Message(role="user", content=TEXT)]
                path = f"/session/{stream}/v1/{PATHS[dialect]}"
                body = {"chat": {"messages": [m.to_openai() for m in said]}}.get(dialect) or {}
                if dialect == "responses":
                    body = {"input": TEXT, "instructions": "Walk."}
                elif dialect == "messages":
                    body = {"messages": [said[1].to_openai()], "system": "Walk."}
                answer = await place.http.post(
                    path, json=body | limit | {"model": "policy", "stream": stream}
                )
                assert answer.status_code == 200, answer.text
                texts.append(_text(dialect, answer, stream))
                assert _reason(dialect, answer, stream) == place.spy.made[-1][1].finish_reason
            assert texts[0] == texts[1]
            session = place.server.sessions.open["True"]
            assert session.turns[0].action == texts[0]

    asyncio.run(run())


def _text(dialect: str, answer: Any, stream: bool) -> str:
    if stream:
        values = events(answer.text)
        kinds: dict[str, Callable[[dict[str, Any]], str]] = {
            "chat": lambda v: v["choices"][0]["delta"].get("content", "") if v["choices"] else "",
            "responses": lambda v: v["delta"] if v["type"] == "response.output_text.delta" else "",
            "messages": lambda v: v["delta"].get("text", "") if v["type"] == "content_block_delta" else "",
        }
        return "".join(kinds[dialect](value) for value in values)
    body = answer.json()
    if dialect == "chat":
        text = body["choices"][0]["message"]["content"]
    else:
        text = (body["output"][0]["content"] if dialect == "responses" else body["content"])[0]["text"]
    return str(text)


def _reason(dialect: str, answer: Any, stream: bool) -> str:
    values = events(answer.text) if stream else [answer.json()]
    if dialect == "chat":
        return str(values[-1]["choices"][0]["finish_reason"])
    if dialect == "responses":
        last = values[-1]["response"] if stream else values[-1]
        assert (last["status"] == "incomplete") == (last["incomplete_details"] is not None)
        return "length" if last["status"] == "incomplete" else "stop"
    last = next(v["delta"] for v in values if v["type"] == "message_delta") if stream else values[-1]
    return {"end_turn": "stop", "max_tokens": "length"}[last["stop_reason"]]


def test_the_model_list_has_the_form_of_the_client(serving: Serving) -> None:
    async def run() -> None:
        async with serving() as place:
            plain = (await place.http.get("/v1/models")).json()
            assert (plain["object"], plain["data"][0]["object"]) == ("list", "model")
            version = {"anthropic-version": "2023-06-01"}
            other = (await place.http.get("/v1/models", headers=version)).json()
            assert (other["data"][0]["type"], other["has_more"], other["last_id"]) == (
                "model",
                False,
                "policy",
            )
            missing = await place.http.get("/v1/nothing", headers=version)
            assert (missing.status_code, missing.json()["type"]) == (404, "error")

    asyncio.run(run())


def test_a_stop_sequence_is_named_in_the_dialect_that_names_it(serving: Serving, tokenizer: Any) -> None:
    from rollgym.testing import ScriptedEngine

    ids = tokenizer.encode("Down Right", add_special_tokens=False)
    engine = ScriptedEngine(lambda request: [*ids, request.sampling.stop_ids[0]])

    async def run() -> None:
        async with serving(inner=engine) as place:
            body = GOOD["messages"] | {"max_tokens": 50, "stop_sequences": ["never", "Right"]}
            answer = (await place.http.post("/v1/messages", json=body)).json()
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Right")
            assert answer["content"][0]["text"].strip() == "Down"
            reply = await ask(place.http, "messages", "x", [Message(role="user", content=TEXT)])
            assert reply.text.strip() == "Down Right"

    asyncio.run(run())
