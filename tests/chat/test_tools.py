"""Tools in conversations: schemas, calls and results of each family's template, with exact masks."""

import pytest
from recorded_conversation import RecordedConversation as Conversation
from talkers import FAMILIES, family
from tool_talk import DOWN, EVERY, EVERY_NATIVE, MOVE, NATIVE, TEMPLATES, UP, call_text, sample

from rollgym.chat import BranchingConversation, ChatTemplate
from rollgym.core.errors import UsageError
from rollgym.core.messages import ImagePart, Message


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
        ("gemma4 tools", "gemma", False),
        ("functiongemma tools", "functiongemma", False),
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
    "functiongemma tools": (
        "<start_function_call>call:move{direction:<escape>up<escape>}<end_function_call>"
    ),
    "gemma4 tools": '<|tool_call>call:move{direction:<|"|>up<|"|>}<tool_call|>',
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


@pytest.mark.parametrize("name", ["qwen3", "qwen3 tools"])
def test_reasoning_can_be_kept(name):
    template = ChatTemplate(family(name))
    talk = Conversation(template, "Play.", tools=[MOVE] if "tools" in name else [], keep_reasoning=True)
    sampled = []
    for text in (THOUGHT + "Up", THOUGHT + "Down", "Left", THOUGHT + "Right"):
        talk.observe("Go <think>.")
        assert not talk.new_row
        ids = sample(talk, text)
        talk.reply(ids)
        sampled += ids
    assert talk.last_message.reasoning == "I should go up"
    (row,) = talk.rows
    assert [i for i, m in zip(row.ids, row.mask, strict=True) if m] == sampled
    plain = Conversation(template, "Play.", tools=[MOVE] if "tools" in name else [])
    for text in ("Up", "Down", "Left", "Right"):
        plain.observe("Go <think>.")
        plain.reply(sample(plain, text))
    # But for the reasoning, the row is what the template writes.
    assert template.codec.decode(talk.prompt_ids).replace(THOUGHT, "") == template.codec.decode(
        plain.prompt_ids
    )


def test_kept_reasoning_that_was_cut_off_is_closed():
    template = ChatTemplate(family("qwen3"))
    talk = Conversation(template, keep_reasoning=True)
    talk.observe("Go.")
    talk.reply(sample(talk, "<think>\nI should", end=False))
    talk.observe("On.")
    assert not talk.new_row
    assert "<think>\nI should<|im_end|>\n<|im_start|>user\nOn." in template.codec.decode(talk.prompt_ids)


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
    up = {"gemma": '<|"|>up<|"|>', "functiongemma": "<escape>up<escape>"}.get(
        template.tools.format.name, '"up"'
    )
    for part in ("Move the player.", "Go.", up, "You moved."):
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
