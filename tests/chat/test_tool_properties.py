"""Tools in conversations: whatever the tools, arguments and results contain, tokens and masks are exact."""

import json
import random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from malformed_calls import malformed
from recorded_conversation import RecordedConversation as Conversation
from spelt import Spelt
from talkers import family
from tool_talk import DOWN, EVERY, EVERY_NATIVE, MOVE, TEMPLATES, UP, call_text, sample

from rollgym.chat import BranchingConversation, ChatTemplate
from rollgym.core.messages import Message, ToolCall, ToolSpec

few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
words = st.sampled_from(
    ["Up", "go left", "42", "box", "\n", " ", '"', "\\", "{", "漢", "\ud800", "\U000f0000"]
)


def texts(name):
    marks = [
        *TEMPLATES[name].codec.added,
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "[TOOL_CALLS]",
            "```",
            "<|call|>",
            "to=functions.x",
        ),
    ]
    whole = st.sampled_from(marks)
    part = st.tuples(whole, st.integers(0, 12)).map(lambda pair: pair[0][: pair[1]])
    return st.lists(st.one_of(whole, whole, part, words), max_size=5).map("".join)


def specs(name):
    text = texts(name)
    parameters = st.dictionaries(
        text, st.fixed_dictionaries({"type": st.just("string"), "description": text})
    )
    return st.builds(
        lambda n, d, p: ToolSpec(name=n, description=d, parameters={"type": "object", "properties": p}),
        text.filter(bool),
        text,
        parameters,
    )


def calls(name):
    values = st.one_of(texts(name), st.integers(), st.none())
    return st.builds(
        lambda n, a: ToolCall(name=n, arguments=a),
        texts(name).filter(bool),
        st.dictionaries(texts(name), values, max_size=2),
    )


@EVERY
@few
@given(data=st.data())
def test_sampled_ids_are_verbatim_and_results_are_masked(name, data):
    template = TEMPLATES[name]
    talk = Conversation(template, "Play.", tools=data.draw(st.lists(specs(name), min_size=1, max_size=2)))
    size = len(family(name))
    sampled = []
    talk.observe("Go.")
    for _ in range(3):
        before = talk.prompt_ids
        if data.draw(st.booleans()):
            ids = sample(talk, call_text(template, data.draw(calls(name))))
        else:
            ids = data.draw(st.lists(st.integers(0, size - 1), max_size=8))
        talk.reply(ids)
        sampled += ids
        assert talk.prompt_ids == (*before, *ids)
        num_calls = len(talk.last_message.tool_calls)
        results = [Message(role="tool", content=data.draw(texts(name))) for _ in range(num_calls)]
        talk.observe(results or data.draw(texts(name)))
        if not talk.new_row:
            assert talk.prompt_ids[: len(before) + len(ids)] == (*before, *ids)
    talk.reply([])
    assert [i for row in talk.rows for i, m in zip(row.ids, row.mask, strict=True) if m] == sampled


@EVERY
@pytest.mark.parametrize(
    "count", [100, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_malformed_calls_in_ids_raise_nothing_and_stay_as_sampled(name, count):
    template, rng = TEMPLATES[name], random.Random(f"fuzz {name}")
    valid = call_text(template, UP)
    begun = BranchingConversation.begin(template, "Play.", [Message(role="user", content="Go.")], [MOVE])
    prompt = begun.prompt_ids
    for _ in range(count):
        talk = begun.fork()
        ids = sample(talk, malformed(rng, valid), end=rng.random() < 0.8)
        talk.reply(ids)
        assert talk.prompt_ids == (*prompt, *ids)
        message = talk.last_message
        assert not (message.tool_calls and talk.call_error)
        talk.observe([Message(role="tool", content="ok") for _ in message.tool_calls] or "No.")
        if not talk.new_row:
            assert talk.prompt_ids[: len(prompt) + len(ids)] == (*prompt, *ids)
            assert talk.added_ids == talk.prompt_ids[len(prompt) + len(ids) :]


@EVERY
@few
@given(data=st.data())
def test_nothing_but_the_template_writes_control_tokens(name, data):
    """Harmless tools, arguments and results in their place: the same control tokens, the same rows."""
    template = TEMPLATES[name]
    controls = set(template.controls.values()) - template.codec.unknown
    results = [data.draw(texts(name)), data.draw(texts(name))]
    assume(all(result.strip() for result in results))
    description = data.draw(texts(name))
    assume(bool(description.strip()) or not template.tools.native)
    seen = []
    for harmless in (False, True):
        spec = ToolSpec(name="move", description="x" if harmless else description, parameters=MOVE.parameters)
        talk = BranchingConversation.begin(
            template,
            "Play.",
            [
                Message(role="user", content="Go."),
                Message(role="assistant", tool_calls=(UP,)),
                Message(role="tool", name="move", content="x" if harmless else results[0]),
            ],
            [spec],
        )
        ids = [i for i in talk.prompt_ids if i in controls]
        talk.reply(sample(talk, call_text(template, DOWN)))
        talk.observe([Message(role="tool", name="move", content="x" if harmless else results[1])])
        seen.append((ids, [i for i in talk.added_ids if i in controls], talk.new_row))
    assert seen[0] == seen[1]


@EVERY_NATIVE
@few
@given(data=st.data())
def test_calls_of_clients_write_no_control_tokens(name, data):
    template = TEMPLATES[name]
    controls = set(template.controls.values()) - template.codec.unknown
    call = data.draw(calls(name))
    # Of the same types: a template may write a control token around every string.
    values = ["x" if isinstance(value, str) else value for value in call.arguments.values()]
    harmless = ToolCall(name="x", arguments={f"{n}": value for n, value in enumerate(values)})
    seen = []
    for made in (call, harmless):
        messages = [
            Message(role="user", content="Go."),
            Message(role="assistant", tool_calls=(made,)),
            Message(role="tool", content="x"),
        ]
        talk = BranchingConversation.begin(template, "", messages, [MOVE])
        seen.append([i for i in talk.prompt_ids if i in controls])
    assert seen[0] == seen[1]


def test_a_template_that_escapes_json_keeps_its_text():
    def render(messages, add_generation_prompt, tools=(), **kwargs):
        text = "".join(f"<start>tools:{json.dumps(tool)}<end>\n" for tool in tools)
        for m in messages:
            calls = "".join(
                f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in m.get("tool_calls", ())
            )
            text += f"<start>{m['role'][0]}:{m['content']}{calls}<end>\n"
        return text + ("<start>a:" if add_generation_prompt else "")

    tokenizer = Spelt(render)
    template = ChatTemplate(tokenizer)
    assert template.tools.native
    spec = ToolSpec(name="move", description="é <end> <eos>", parameters={})
    talk = Conversation(template, tools=[spec])
    talk.observe("Go.")
    text = tokenizer.decode(talk.prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert text == render([{"role": "user", "content": "Go."}], True, [spec.to_openai()])
    assert "\\u00e9 <end> <eos>" in text
    assert sum(number == template.codec.added["<end>"] for number in talk.prompt_ids) == 2
