"""Structured messages and their OpenAI form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.core.messages import ImagePart, Message, TextPart, ToolCall, ToolSpec

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
calls = st.builds(
    ToolCall,
    name=st.text("abc_", min_size=1, max_size=6),
    arguments=st.dictionaries(st.text(max_size=5), json_values, max_size=3),
    id=st.text("0123456789", max_size=4),
)
assistants = st.builds(
    Message,
    role=st.just("assistant"),
    content=st.text(max_size=20),
    reasoning=st.text(max_size=20),
    tool_calls=st.lists(calls, max_size=3).map(tuple),
)
results = st.builds(
    Message,
    role=st.just("tool"),
    content=st.text(max_size=20)
    | st.tuples(st.builds(TextPart, text=st.text(max_size=5)), st.builds(ImagePart, url=st.just("data:,"))),
    tool_call_id=st.text("0123456789", max_size=4),
    name=st.text("abc", max_size=4),
)


@given(assistants | results)
def test_a_message_survives_openais_form_and_json(message: Message) -> None:
    text = json.dumps(message.to_openai())
    assert Message.from_openai(json.loads(text)) == message


def test_a_call_as_plain_text_is_its_json() -> None:
    call = ToolCall(name="move", arguments={"direction": "Hälfte"}, id="call_1")
    assert call.to_json() == '{"name": "move", "arguments": {"direction": "Hälfte"}}'
    assert call.to_openai()["function"]["arguments"] == '{"direction": "Hälfte"}'


def test_a_tool_in_openais_form() -> None:
    tool = ToolSpec(name="wait", description="Wait a turn.")
    assert tool.to_openai() == {
        "type": "function",
        "function": {
            "name": "wait",
            "description": "Wait a turn.",
            "parameters": {"type": "object", "properties": {}},
        },
    }


def test_text_parts_become_text_and_the_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "input_text", "text": "there"}]
    message = Message.from_openai({"role": "developer", "content": parts})
    assert message == Message(role="system", content="Hello\nthere")
    assert Message.from_openai({"role": "assistant", "content": None}).content == ""


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "robot", "content": ""}, "role must be one of system, user, assistant, tool, not 'robot'"),
        ({"content": ""}, "role must be one of"),
        ({"role": "user", "content": 3}, "a string or a list of parts"),
        ({"role": "user", "content": [{"type": "audio"}]}, "'audio' are not supported"),
        ({"role": "user", "content": [{"type": "text"}]}, "needs a text"),
        ({"role": "user", "content": [7]}, "must be an object"),
        ({"role": "user", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}, "only the"),
        ({"role": "assistant", "tool_calls": 3}, "must be a list"),
        ({"role": "assistant", "tool_calls": [{}]}, "needs a function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "", "arguments": "{}"}}]}, "the name of"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]},
            "must be JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[]"}}]},
            "JSON object",
        ),
        ({"role": "user", "content": "", "tool_call_id": "1"}, "only a message of role tool"),
    ],
)
def test_what_is_not_a_message_is_rejected_with_the_reason(message: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Message.from_openai(message)
