"""Tools in conversations: schemas, calls and results of each family's template, with exact masks."""

import json

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from recorded_conversation import RecordedConversation as Conversation
from spelt import Spelt
from talkers import FAMILIES, TOOL_FAMILIES, family

from rollgym.chat import BranchingConversation, ChatTemplate
from rollgym.chat.tokenizer import MIDDLE
from rollgym.core.errors import UsageError
from rollgym.core.messages import ImagePart, Message, ToolCall, ToolSpec
from rollgym.core.serialization import clean_text

NATIVE = sorted(TOOL_FAMILIES)
NAMES = [*NATIVE, "gemma", "smollm2", "llama3"]
TEMPLATES = {name: ChatTemplate(family(name)) for name in NAMES}
EVERY = pytest.mark.parametrize("name", NAMES)
EVERY_NATIVE = pytest.mark.parametrize("name", NATIVE)
MOVE = ToolSpec(
    name="move",
    description="Move the player.",
    parameters={
        "type": "object",
        "properties": {"direction": {"type": "string", "enum": ["up", "down"], "description": "Where to."}},
        "required": ["direction"],
    },
)
UP, DOWN = (ToolCall(name="move", arguments={"direction": d}) for d in ("up", "down"))
few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def sample(talk, text, end=True):
    """The ids of a reply, as a model would sample them."""
    template = talk.template
    ids = template.codec.encode([clean_text(text)], MIDDLE)
    if not end:
        return ids
    harmony_call = template.tools.format.name == "harmony" and "to=functions." in text
    return [*ids, template.codec.added["<|call|>"] if harmony_call else talk.stop_ids[0]]


def call_text(template, *calls):
    return template.facts.lead * (not template.tools.format.channels) + template.tools.format.write(calls)


def written(name, messages, tools=(MOVE,)):
    variable = TEMPLATES[name].tools.variable
    return family(name).apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=True,
        **{variable: [spec.to_openai() for spec in tools]},
    )


@pytest.mark.parametrize(
    ("name", "format", "verbatim"),
    [
        ("qwen2.5 tools", "hermes", True),
        ("qwen3 tools", "hermes", True),
        ("smollm3 tools", "hermes", True),
        ("llama3 tools", "llama", True),
        ("mistral tools", "mistral", False),
        ("gpt-oss tools", "harmony", False),
    ],
)
def test_the_format_of_a_family_is_found_by_its_output(name, format, verbatim):
    facts = TEMPLATES[name].tools
    assert (facts.format.name, facts.native, facts.verbatim, facts.reason) == (format, True, verbatim, "")


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_template_without_tools_gets_them_through_the_prompt(name):
    facts = ChatTemplate(family(name)).tools
    assert (facts.format.name, facts.native) == ("json", False)
    assert "does not show tools" in facts.reason


def test_a_format_can_be_set():
    same = ChatTemplate(family("qwen2.5 tools"), tool_format="hermes").tools
    assert same.native
    other = ChatTemplate(family("qwen2.5 tools"), tool_format="llama").tools
    assert (other.format.name, other.native, other.reason) == ("llama", False, "tool_format=llama was set")
    with pytest.raises(UsageError, match="tool_format must be"):
        ChatTemplate(family("qwen2.5"), tool_format="none")


@EVERY_NATIVE
def test_tools_reach_the_model_as_the_template_writes_them(name):
    talk = Conversation(TEMPLATES[name], tools=[MOVE])
    talk.observe("Go.")
    assert family(name).decode(talk.prompt_ids) == written(name, [{"role": "user", "content": "Go."}])
    without = Conversation(TEMPLATES[name])
    without.observe("Go.")
    assert "Move the player." not in family(name).decode(without.prompt_ids)


@EVERY
def test_a_call_and_its_result(name):
    template = TEMPLATES[name]
    talk = Conversation(template, "Play.", tools=[MOVE])
    talk.observe("Go.")
    assert "Move the player." in family(name).decode(talk.prompt_ids)
    for number, call in enumerate((UP, DOWN)):
        before = talk.prompt_ids
        ids = sample(talk, call_text(template, call))
        talk.reply(ids)
        (found,) = talk.last_message.tool_calls
        assert (found.name, found.arguments, found.id) == (call.name, call.arguments, f"call{number:05d}")
        assert talk.call_error == ""
        talk.observe([Message(role="tool", content=f"It is {number}.", name="move", tool_call_id="x")])
        assert not talk.new_row
        assert talk.prompt_ids[: len(before) + len(ids)] == (*before, *ids)
        assert f"It is {number}." in template.codec.decode(talk.added_ids)
    talk.reply(sample(talk, "Done"))
    (row,) = talk.rows
    assert "It is" not in template.codec.decode([i for i, m in zip(row.ids, row.mask, strict=True) if m])


CANONICAL = {
    "qwen2.5 tools": '<tool_call>\n{"name": "move", "arguments": {"direction": "up"}}\n</tool_call>',
    "qwen3 tools": '<tool_call>\n{"name": "move", "arguments": {"direction": "up"}}\n</tool_call>',
    "smollm3 tools": '<tool_call>{"name": "move", "arguments": {"direction": "up"}}</tool_call>',
    "llama3 tools": '{"name": "move", "parameters": {"direction": "up"}}',
    "mistral tools": '[TOOL_CALLS] [{"name": "move", "arguments": {"direction": "up"}, "id": "call00000"}]',
    "gpt-oss tools": ' to=functions.move<|channel|>commentary json<|message|>{"direction": "up"}',
}
"""A call as each template writes it."""


@EVERY_NATIVE
def test_a_call_in_the_templates_own_words_gives_the_templates_text(name):
    talk = Conversation(TEMPLATES[name], "Play.", tools=[MOVE])
    talk.observe("Go.")
    talk.reply(sample(talk, CANONICAL[name]))
    (call,) = talk.last_message.tool_calls
    assert (call.name, call.arguments) == ("move", {"direction": "up"})
    talk.observe([Message(role="tool", content="You moved.")])
    messages = [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Go."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "call00000",
                    "function": {"name": "move", "arguments": {"direction": "up"}},
                }
            ],
        },
        {"role": "tool", "content": "You moved.", "tool_call_id": "call00000", "name": "move"},
    ]
    assert family(name).decode(talk.prompt_ids) == written(name, messages)


@EVERY
def test_a_call_in_other_words_stays_as_it_was_sampled(name):
    template = TEMPLATES[name]
    talk = Conversation(template, tools=[MOVE])
    talk.observe("Go.")
    text = call_text(template, UP).replace('": ', '"  :  ')
    ids = sample(talk, text)
    talk.reply(ids)
    assert talk.last_message.tool_calls[0].arguments == {"direction": "up"}
    before = talk.prompt_ids
    talk.observe([Message(role="tool", content="You moved.", name="move")])
    assert not talk.new_row
    assert talk.prompt_ids[: len(before)] == before
    assert text.strip() in template.codec.decode(talk.prompt_ids)


@EVERY
def test_a_call_that_was_cut_off_is_closed(name):
    """`max_tokens` ended the reply: the template's end of the call is added, with mask 0."""
    template = TEMPLATES[name]
    talk = Conversation(template, tools=[MOVE])
    talk.observe("Go.")
    ids = sample(talk, call_text(template, UP), end=False)
    talk.reply(ids)
    assert talk.last_message.tool_calls
    talk.observe([Message(role="tool", content="You moved.", name="move")])
    assert not talk.new_row
    end = sample(talk, call_text(template, UP))[-1]
    if template.facts.end_of_turn or template.tools.native:
        # A tokenizer may write the white space before the end as a token of its own.
        assert end in talk.added_ids[:2]


@pytest.mark.parametrize("name", [n for n in NATIVE if TEMPLATES[n].tools.parallel])
def test_several_calls_of_a_turn(name):
    template = TEMPLATES[name]
    talk = Conversation(template, tools=[MOVE])
    talk.observe("Go.")
    talk.reply(sample(talk, call_text(template, UP, DOWN)))
    calls = talk.last_message.tool_calls
    assert [call.arguments["direction"] for call in calls] == ["up", "down"]
    first, second = (call.id for call in calls)
    talk.observe(
        [
            Message(role="tool", content="Result B", tool_call_id=second),
            Message(role="tool", content="Result A", tool_call_id=first),
        ]
    )
    assert not talk.new_row
    text = template.codec.decode(talk.added_ids)
    assert text.index("Result B") < text.index("Result A")
    if name == "mistral tools":
        assert text.index(second) < text.index(first)


@EVERY
@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "move"', "[TOOL_CALLS][{", '{"name": ', "```json\n{", "Up"]
)
def test_a_malformed_call_is_text_and_the_conversation_goes_on(name, text):
    template = TEMPLATES[name]
    talk = Conversation(template, tools=[MOVE])
    talk.observe("Go.")
    ids = sample(talk, text)
    talk.reply(ids)
    assert talk.last_message.tool_calls == ()
    talk.observe("That is not a call.")
    talk.reply(sample(talk, call_text(template, UP)))
    assert talk.last_message.tool_calls
    talk.observe([Message(role="tool", content="You moved.")])
    sampled = [i for row in talk.rows for i, m in zip(row.ids, row.mask, strict=True) if m]
    assert sampled[: len(ids)] == ids


THOUGHT = "<think>\nI should go up\n</think>\n\n"


def test_reasoning_stays_until_the_user_asks_again():
    template = TEMPLATES["qwen3 tools"]
    talk = Conversation(template, tools=[MOVE])
    talk.observe("Go.")
    talk.reply(sample(talk, THOUGHT + call_text(template, UP)))
    assert talk.last_message.reasoning == "I should go up"
    assert talk.last_message.tool_calls
    talk.observe([Message(role="tool", content="You moved.")])
    assert not talk.new_row
    talk.reply(sample(talk, "Done"))
    talk.observe("On.")
    assert talk.new_row
    assert "I should go up" not in template.codec.decode(talk.prompt_ids)
    assert call_text(template, UP) in template.codec.decode(talk.prompt_ids)


def test_channels():
    template = TEMPLATES["gpt-oss tools"]
    talk = Conversation(template, tools=[MOVE])
    talk.observe("Go.")
    analysis = "<|channel|>analysis<|message|>I should go up<|end|><|start|>assistant"
    talk.reply(sample(talk, analysis + call_text(template, UP)))
    assert talk.last_message.reasoning == "I should go up"
    talk.observe([Message(role="tool", content="You moved.")])
    assert not talk.new_row
    talk.reply(sample(talk, analysis + "<|channel|>final<|message|>Done"))
    assert (talk.last_message.content, talk.last_message.reasoning) == ("Done", "I should go up")
    talk.observe("On.")
    assert talk.new_row  # the template drops the reasoning before an answer
    text = template.codec.decode(talk.prompt_ids)
    assert "I should go up" not in text
    assert "<|channel|>final<|message|>Done<|end|>" in text


def test_tools_that_move_begin_a_new_row():
    template = TEMPLATES["mistral tools"]
    talk = Conversation(template, tools=[MOVE])
    talk.observe("Go.")
    talk.reply(sample(talk, " Up"))
    talk.observe("That is not a call.")
    assert talk.new_row
    assert template.codec.decode(talk.prompt_ids).count("[AVAILABLE_TOOLS]") == 1


@EVERY
def test_history_is_rendered_like_the_conversation_it_was(name):
    template = TEMPLATES[name]
    talk = Conversation(template, "Play.", tools=[MOVE])
    talk.observe("Go.")
    talk.reply(sample(talk, template.facts.lead * 0 + CANONICAL.get(name, call_text(template, UP))))
    result = [Message(role="tool", content="You moved.", name="move")]
    again = Conversation(template, "Play.", [("Go.", talk.last_reply)], tools=[MOVE])
    talk.observe(result)
    again.observe(result)
    if template.tools.verbatim or name == "mistral tools":
        assert (
            template.codec.decode(again.prompt_ids).split() == template.codec.decode(talk.prompt_ids).split()
        )
    assert "You moved." in template.codec.decode(again.prompt_ids)


@EVERY
def test_an_observation_of_results_can_be_undone(name):
    template = TEMPLATES[name]
    talk = Conversation(template, "Play.", tools=[MOVE])
    talk.observe("Go.")
    talk.reply(sample(talk, call_text(template, UP)))
    before = talk.prompt_ids
    talk.observe([Message(role="tool", content="A long result", name="move")])
    talk.undo_observe()
    assert talk.prompt_ids == before
    talk.observe([Message(role="tool", content="You moved.", name="move")])
    assert "A long result" not in template.codec.decode(talk.prompt_ids)


@EVERY
def test_a_client_that_sends_all_messages(name):
    template = TEMPLATES[name]
    messages = [
        Message(role="user", content="Go."),
        Message(role="assistant", content="Well.", tool_calls=(UP,)),
        Message(role="tool", content="You moved.", name="move", tool_call_id="call_of_a_client"),
    ]
    talk = BranchingConversation.begin(template, "Play.", messages, [MOVE])
    text = template.codec.decode(talk.prompt_ids)
    for part in ("Move the player.", "Go.", '"up"', "You moved."):
        assert part in text
    fork = talk.fork()
    for one in (talk, fork):
        one.reply(sample(one, call_text(template, DOWN)))
        assert one.last_message.tool_calls[0].arguments == {"direction": "down"}
    fork.observe([Message(role="tool", content="You moved again.", name="move")])
    assert "again" in template.codec.decode(fork.prompt_ids)
    assert "again" not in template.codec.decode(talk.prompt_ids)
    same = BranchingConversation.begin(template, "Play.", [m.to_openai() for m in messages], [MOVE])
    assert template.codec.decode(same.prompt_ids) == text


def test_messages_that_do_not_belong_are_refused():
    talk = Conversation(TEMPLATES["qwen2.5 tools"], tools=[MOVE])
    with pytest.raises(UsageError, match="message of the assistant"):
        talk.observe([Message(role="assistant", content="Up")])
    with pytest.raises(UsageError, match="Images"):
        talk.observe([Message(role="user", content=(ImagePart(url="data:"),))])


# Properties: whatever the tools, arguments and results contain.

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
    harmless = ToolCall(name="x", arguments={f"{n}": "x" for n in range(len(call.arguments))})
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
