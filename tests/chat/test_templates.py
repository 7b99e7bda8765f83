"""Probed properties of templates, and templates that are rejected."""

import re
from typing import Any

import pytest
from spelt import END, Spelt, chatml
from talkers import CHATML, FAMILIES, family, make

from rollgym.chat import ChatTemplate, Conversation
from rollgym.chat.template_probe import difference
from rollgym.core.errors import UsageError

EVERY = sorted(FAMILIES)


def facts(name: str, **kwargs: Any) -> Any:
    return ChatTemplate(family(name), kwargs).facts


def rewritten(name: str, **kwargs: Any) -> list[str]:
    return [rewrite.what for rewrite in facts(name, **kwargs).rewrites]


@pytest.mark.parametrize(
    ("name", "end", "separator", "prompt", "lead", "system", "marked"),
    [
        ("qwen2.5", "<|im_end|>", "\n", "<|im_start|>assistant\n", "", True, True),
        ("smollm2", "<|im_end|>", "\n", "<|im_start|>assistant\n", "", True, True),
        ("qwen3", "<|im_end|>", "\n", "<|im_start|>assistant\n", "", True, True),
        ("llama3", "<|eot_id|>", "", "<|start_header_id|>assistant<|end_header_id|>\n\n", "", True, True),
        ("gemma", "<end_of_turn>", "\n", "<start_of_turn>model\n", "", False, True),
        ("mistral", "</s>", "", "", " ", True, False),
        ("padded", "<|end|>", "\n", "<|assistant|>\n", "", True, True),
        ("words", "", "\n", "assistant:", " ", True, False),
    ],
)
def test_how_each_family_puts_a_conversation_together(name, end, separator, prompt, lead, system, marked):
    found = facts(name)
    assert (found.end_of_turn, found.separator, found.generation_prompt) == (end, separator, prompt)
    assert (found.lead, found.system_role, found.marked) == (lead, system, marked)
    if end:
        assert found.end_of_turn_id == family(name).convert_tokens_to_ids(end)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("qwen2.5", ["<|im_end|>"]),
        ("smollm2", ["<|im_end|>", "<|endoftext|>"]),
        ("llama3", ["<|eot_id|>", "<|end_of_text|>"]),
        ("gemma", ["<end_of_turn>", "<eos>"]),
        ("words", ["<|endoftext|>"]),
    ],
)
def test_a_reply_ends_at_the_end_of_a_turn_and_at_the_end_of_text(name, tokens):
    assert list(facts(name).stop_ids) == family(name).convert_tokens_to_ids(tokens)


def test_what_each_family_rewrites():
    assert {name: rewritten(name) for name in EVERY} == {
        "qwen2.5": [],
        "smollm2": [],
        "qwen3": ["reasoning in a reply"],
        "llama3": ["white space around a reply"],
        "gemma": ["white space around a reply"],
        "mistral": ["the system message"],
        "padded": [],
        "words": [],
    }


def test_a_generation_prompt_that_is_not_kept_rewrites_every_reply():
    assert rewritten("qwen3", enable_thinking=False) == ["a plain reply"]
    assert facts("qwen3", enable_thinking=False).always_rewrites
    assert not facts("qwen3").always_rewrites


def test_a_rewrite_is_shown_at_its_first_difference():
    (rewrite,) = facts("qwen3").rewrites
    assert rewrite.difference.startswith("at character 57: expected …'")
    assert "<think>" in rewrite.difference.partition("found")[0]
    assert "qzreply<|im_end|>" in rewrite.difference.partition("found")[2]


@pytest.mark.parametrize(
    ("expected", "found", "sentence"),
    [
        ("abc", "abd", "at character 2: expected 'abc', found 'abd'"),
        ("ab", "abc", "at character 2: expected 'ab', found 'abc'"),
        ("", "a", "at character 0: expected '', found 'a'"),
        ("a" * 40, "a" * 39 + "b", "at character 39: expected …" + repr("a" * 25)),
        ("same", "same", "no difference"),
    ],
)
def test_a_difference_is_named_with_its_surroundings(expected, found, sentence):
    assert difference(expected, found).startswith(sentence)


def test_control_tokens_are_special_ones_and_those_that_the_template_writes():
    gemma = ChatTemplate(family("gemma"))
    assert set(gemma.controls) == {"<unk>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"}
    assert "\n\n" in gemma.codec.added
    assert set(ChatTemplate(family("qwen3")).controls) == {"<|im_start|>", "<|im_end|>"}
    silent = ChatTemplate(family("qwen3"), {"enable_thinking": False})
    assert {"<think>", "</think>"} <= set(silent.controls)


def test_a_system_text_without_a_system_role_leads_the_first_message():
    talk = Conversation(ChatTemplate(family("gemma")), system="Play well.")
    talk.observe("Go.")
    text = "<bos><start_of_turn>user\nPlay well.\n\nGo.<end_of_turn>\n<start_of_turn>model\n"
    assert family("gemma").decode(talk.prompt_ids) == text
    talk.reply([talk.stop_ids[0]])
    talk.observe("On.")
    assert "Play well" not in family("gemma").decode(talk.added_ids)


def test_a_system_text_that_the_template_drops_leads_the_first_message():
    def deaf(messages: Any, add_generation_prompt: bool, **kwargs: Any) -> str:
        return chatml([m for m in messages if m["role"] != "system"], add_generation_prompt)

    talk = Conversation(ChatTemplate(Spelt(deaf)), system="Play.")
    talk.observe("Go.")
    assert "u:Play.\n\nGo.<end>" in talk.template.codec.decode(talk.prompt_ids)


def refusal(render: Any, **kwargs: Any) -> str:
    with pytest.raises(UsageError) as caught:
        ChatTemplate(Spelt(render, **kwargs))
    return str(caught.value)


def test_no_template_is_refused():
    with pytest.raises(UsageError, match=r"^The tokenizer has no chat template"):
        ChatTemplate(make(None, eos="</s>"))


def test_a_template_that_does_not_take_turns_is_refused():
    template = (
        "{%- if messages | length > 2 -%}{{- raise_exception('one question only') -}}{%- endif -%}" + CHATML
    )
    with pytest.raises(UsageError, match=r"refuses the messages user, assistant, user.*one question only"):
        ChatTemplate(make(template, special=["<|im_start|>"], eos="<|im_end|>"))


def test_a_broken_template_is_refused_with_its_error():
    with pytest.raises(UsageError, match=r"refuses the messages user: .*TemplateSyntaxError"):
        ChatTemplate(make("{% for m in %}", eos="</s>"))


def test_a_template_that_writes_at_random_is_refused_with_the_difference():
    template = "{{- ['heads', 'tails', 'edges'] | random -}}" + CHATML
    with pytest.raises(UsageError, match=r"not write the same text twice.*at character \d+: expected '"):
        ChatTemplate(make(template, special=["<|im_start|>"], eos="<|im_end|>"))


DATED = "{{- 'Today is ' + strftime_now('%d %b %Y') + '.' -}}" + CHATML
DATED_SYSTEM = "{%- if messages[0]['role'] == 'system' -%}{{- strftime_now('%H') -}}{%- endif -%}" + CHATML


@pytest.mark.parametrize("template", [DATED, DATED_SYSTEM])
def test_a_template_that_writes_the_date_is_refused_unless_it_is_given_one(template):
    tokenizer = make(template, special=["<|im_start|>"], eos="<|im_end|>")
    with pytest.raises(UsageError, match=r"writes today's date.*expected .*date=YYYY-MM-DD"):
        ChatTemplate(tokenizer)
    ChatTemplate(tokenizer, date="2024-07-26")


def test_a_fixed_date_reaches_the_template():
    tokenizer = make(DATED, special=["<|im_start|>"], eos="<|im_end|>")
    talk = Conversation(ChatTemplate(tokenizer, date="2024-07-26"))
    talk.observe("Go.")
    assert tokenizer.decode(talk.prompt_ids).startswith("Today is 26 Jul 2024.<|im_start|>")
    with pytest.raises(UsageError, match="date must be a day such as 2025-01-31, not 'today'"):
        ChatTemplate(tokenizer, date="today")


def test_a_template_that_reorders_messages_is_refused():
    def backwards(messages: Any, **kwargs: Any) -> str:
        return chatml(messages[::-1], **kwargs)

    said = refusal(backwards)
    assert "each message once and in order" in said
    assert "expected 'qzfirst qzreply qzsecond', found 'qzsecond qzreply qzfirst'" in said


@pytest.mark.parametrize(
    ("choose", "found"),
    [
        (lambda messages: messages[-1:], "qzsecond"),
        (lambda messages: messages[:1], "qzfirst"),
        (lambda messages: messages + messages[-1:], ""),
    ],
)
def test_a_template_that_drops_or_repeats_messages_is_refused(choose, found):
    said = refusal(lambda messages, **kwargs: chatml(choose(messages), **kwargs))
    assert re.search(rf"expected .*, found '{found}", said)


def test_template_kwargs_reach_the_template():
    def loud(messages: Any, add_generation_prompt: bool, mood: str = "", **kwargs: Any) -> str:
        return mood + chatml(messages, add_generation_prompt)

    talk = Conversation(ChatTemplate(Spelt(loud), {"mood": "glad"}))
    talk.observe("hi")
    assert talk.template.codec.decode(talk.prompt_ids).startswith("glad<start>u:hi")


def test_another_template_can_be_given():
    talk = Conversation(ChatTemplate(family("words"), {"chat_template": DATED}, date="2024-07-26"))
    talk.observe("hi")
    assert family("words").decode(talk.prompt_ids).startswith("Today is 26 Jul 2024.<|im_start|>system")
    with pytest.raises(UsageError, match="refuses the messages user: .*tokenize"):
        ChatTemplate(family("words"), {"tokenize": True})


def test_a_template_that_ends_turns_in_two_ways_has_no_end_of_turn():
    def moody(messages: Any, add_generation_prompt: bool, **kwargs: Any) -> str:
        text = chatml(messages, add_generation_prompt)
        return text if messages[-1]["role"] == "user" else text.replace("<end>", "<eos>")

    template = ChatTemplate(Spelt(moody))
    assert template.facts.end_of_turn == ""
    talk = Conversation(template)
    talk.observe("hi")
    talk.reply([*b"Up"])
    talk.observe("ok")
    assert talk.added_ids[0] == END
