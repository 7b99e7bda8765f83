"""Tool calls in the text of replies: every family's form is read, and nothing malformed raises."""

import json
import random

import pytest
from malformed_calls import malformed

from rollgym.chat.tool_formats import FORMATS, split_reasoning
from rollgym.core.errors import UsageError
from rollgym.core.messages import ToolCall, ToolSpec

UP = ToolCall(name="move", arguments={"direction": "up"})
HARD = ToolCall(
    name="note", arguments={"text": 'a "b" </tool_call> ``` <|end|> \\ 漢 \n', "n": [1, {"x": None}]}
)
EVERY = pytest.mark.parametrize("name", sorted(FORMATS))


def parse(name, text):
    return FORMATS[name].parse(text)


@EVERY
@pytest.mark.parametrize("calls", [[UP], [UP, HARD], [HARD, HARD]])
def test_what_a_format_writes_it_reads(name, calls):
    if name in ("harmony", "json"):
        calls = [UP if call is HARD else call for call in calls]  # control tokens and fences end their forms
    parsed = parse(name, FORMATS[name].write(calls))
    assert parsed.error == ""
    assert list(parsed.calls) == calls
    assert parsed.content == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'Right.\n<tool_call>{"name": "move", "arguments": {"direction": "up"}}</tool_call>\n'),
        ("hermes", 'Right.<tool_call>[{"name": "move", "arguments": {"direction": "up"}}]</tool_call>'),
        ("hermes", 'Right.<tool_call>\n{"name": "move", "arguments": "{\\"direction\\": \\"up\\"}"}'),
        ("llama", '<|python_tag|>{"name": "move", "parameters": {"direction": "up"}}'),
        ("llama", '{"type": "function", "name": "move", "parameters": {"direction": "up"}};'),
        ("llama", '{"type": "function", "function": {"name": "move", "parameters": {"direction": "up"}}}'),
        ("mistral", 'Right.[TOOL_CALLS] [{"name": "move", "arguments": {"direction": "up"}}]'),
        ("mistral", 'Right.[TOOL_CALLS]move[ARGS]{"direction": "up"}'),
        ("mistral", 'Right.[TOOL_CALLS]move{"direction": "up"}'),
        ("harmony", '<|channel|>commentary to=functions.move<|message|>{"direction": "up"}'),
        (
            "harmony",
            "<|channel|>analysis<|message|>Up?<|end|><|start|>assistant to=functions.move"
            '<|channel|>commentary json<|message|>{"direction": "up"}',
        ),
        (
            "harmony",
            "<|channel|>commentary<|message|>Right.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.move <|constrain|>json<|message|>{"direction": "up"}<|call|>',
        ),
        ("gemma", 'Right.<|tool_call>call:move{direction:<|"|>up<|"|>}<tool_call|>'),
        ("gemma", '<|tool_call>call: move { "direction" : "up" }'),
        ("gemma", '<|tool_call>call:move{<|"|>direction<|"|>:<|"|>up<|"|>,}<tool_call|>\n'),
        (
            "functiongemma",
            "Right.<start_function_call>call:move{direction:<escape>up<escape>}<end_function_call>",
        ),
        ("json", 'Right.\n```json\n{"name": "move", "arguments": {"direction": "up"}}\n```'),
        ("json", '```tool_code\n{"name": "move", "parameters": {"direction": "up"}}'),
        ("json", '{"name": "move", "arguments": {"direction": "up"}}'),
        ("json", '<tool_call>{"name": "move", "arguments": {"direction": "up"}}</tool_call>'),
    ],
)
def test_variants_that_models_write(name, text):
    parsed = parse(name, text)
    assert parsed.error == ""
    assert [(call.name, call.arguments) for call in parsed.calls] == [("move", {"direction": "up"})]
    assert parsed.content == ("Right." if "Right." in text else "")


@pytest.mark.parametrize(
    ("name", "text", "content", "reasoning"),
    [
        ("hermes", "I wait.", "I wait.", ""),
        ("hermes", "<think>\nHm.\n</think>\n\nI wait.", "I wait.", "Hm."),
        ("hermes", "Hm.</think>I wait.", "I wait.", "Hm."),
        ("hermes", "<think>Hm, <tool_call>{", "", "Hm, <tool_call>{"),
        ("llama", '{"answer": 3}', '{"answer": 3}', ""),
        ("llama", "Say {name}.", "Say {name}.", ""),
        ("mistral", "[THINK]Hm.[/THINK]I wait.", "I wait.", "Hm."),
        ("harmony", "<|channel|>final<|message|>I wait.", "I wait.", ""),
        ("harmony", "I wait.", "I wait.", ""),
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>I wait.",
            "I wait.",
            "Hm.",
        ),
        ("gemma", "<|channel>thought\nHm.\n<channel|>I wait.", "I wait.", "Hm."),
        ("gemma", "I call: {b}", "I call: {b}", ""),
        ("json", "```python\nprint(1)\n```", "```python\nprint(1)\n```", ""),
        ("json", '```json\n{"answer": 3}\n```', '```json\n{"answer": 3}\n```', ""),
    ],
)
def test_replies_without_calls(name, text, content, reasoning):
    parsed = parse(name, text)
    assert (parsed.content, parsed.reasoning, parsed.calls, parsed.error) == (content, reasoning, (), "")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("hermes", "<tool_call>{", "not valid JSON"),
        ("hermes", "<tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "a"} and', "</tool_call> is missing"),
        ("hermes", '{"name": "a"}</tool_call>', "<tool_call> is missing"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "name of a tool is missing"),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', "name of a tool is missing"),
        ("hermes", '<tool_call>"a"</tool_call>', "must be a JSON object"),
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"x": ' + "[" * 70 + "]" * 70 + "}}</tool_call>",
            "nested more than 64",
        ),
        ("hermes", "<tool_call>" + "[" * 100_000, "not valid JSON"),
        ("llama", '{"name": "a", "parameters": {', "not valid JSON"),
        ("llama", "<|python_tag|>", "no call follows"),
        ("llama", "<|python_tag|>print(1)", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]", "not valid JSON"),
        ("mistral", "[TOOL_CALLS][]", "no call follows"),
        ("mistral", '[TOOL_CALLS][{"name": "a"}] done', "text follows"),
        ("harmony", "<|channel|>commentary to=functions.a<|message|>{", "not valid JSON"),
        ("harmony", "<|channel|>commentary to=browser.open<|message|>{}", "is not a tool"),
        ("gemma", "<|tool_call>", "call:NAME{…} must follow"),
        ("gemma", "<|tool_call>call:a", "call:NAME{…} must follow"),
        ("gemma", "<|tool_call>call:a{b", "a colon is missing"),
        ("gemma", "<|tool_call>call:a{:1}", "name of an argument is missing"),
        ("gemma", '<|tool_call>call:a{b:<|"|>c}', "a string does not end"),
        ("gemma", "<|tool_call>call:a{b:[1 2]}", "a comma or ] is missing"),
        ("gemma", "<|tool_call>call:a{b:up}", "not valid JSON"),
        ("gemma", "<|tool_call>call:a{b:NaN}", "NaN is not JSON"),
        ("gemma", "<|tool_call>call:a{} and", "<tool_call|> is missing"),
        ("gemma", "call:a{}<tool_call|>", "<|tool_call> is missing"),
        ("gemma", "<|tool_call>call:a{b:" + "[" * 100_000, "nested more than 64"),
        ("json", '```json\n{"name": "a", "arguments": {\n```', "not valid JSON"),
        ("json", '{"name": "a", ', "not valid JSON"),
    ],
)
def test_malformed_calls_are_explained(name, text, error):
    parsed = parse(name, text)
    assert error in parsed.error
    assert FORMATS[name].write([ToolCall(name="NAME", arguments={"ARGUMENT": "VALUE"})]) in parsed.error
    assert parsed.calls == ()


def test_arguments_survive_a_file():
    parsed = parse(
        "hermes", '<tool_call>{"name": "a", "arguments": {"x": "\\ud800", "y": 1e999}}</tool_call>'
    )
    assert parsed.calls[0].arguments == {"x": "�" * 3, "y": None} or parsed.calls[0].arguments["y"] is None
    json.dumps(parsed.calls[0].arguments).encode()


@EVERY
def test_ten_thousand_malformed_replies_raise_nothing(name):
    rng = random.Random(f"fuzz {name}")
    valid = FORMATS[name].write([UP, HARD])
    for _ in range(10_000):
        parsed = parse(name, malformed(rng, valid))
        assert not (parsed.calls and parsed.error)
        for call in parsed.calls:
            assert call.name
            json.dumps([call.name, call.arguments], allow_nan=False)


@EVERY
def test_the_prompt_shows_tools_and_a_call(name):
    spec = ToolSpec(name="move", description="Move the player.", parameters={"type": "object"})
    text = FORMATS[name].describe([spec])
    assert '"name": "move", "description": "Move the player."' in text
    assert "NAME" in text


def test_reasoning_is_split_only_at_the_start():
    assert split_reasoning("Say <think>a</think> b") == ("", "Say <think>a</think> b")
    assert split_reasoning("\n<think>a</think> b") == ("a", " b")


def test_an_unknown_format_is_refused():
    from rollgym.chat.tool_formats import find_format

    with pytest.raises(UsageError, match="tool_format must be auto or one of hermes, llama"):
        find_format("xml")
