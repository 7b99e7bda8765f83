"""Whole conversations with each family's template, against what the template itself writes."""

from typing import Any

import pytest
from recorded_conversation import RecordedConversation as Conversation
from talkers import FAMILIES, family, make

from rollgym.chat import ChatTemplate
from rollgym.chat.tokenizer import MIDDLE

EVERY = sorted(FAMILIES)
OBSERVATIONS = ["The door is shut.", "Nothing happens.\nYou may answer Up.", "", "It opens.  \n # . #"]
REPLIES = ["Up", "go left", "<answer>Down</answer>", "42"]


def sampled(talk: Conversation, text: str, end: bool = True) -> list[int]:
    """The ids that a model of that family would sample for a text."""
    facts = talk.template.facts
    ids = talk.template.codec.encode([facts.lead + text + facts.tail], MIDDLE)
    return ids + ([talk.stop_ids[0]] if end and facts.end_of_turn else [])


def written(name: str, messages: list[dict[str, str]]) -> str:
    text = family(name).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def play(name: str, system: str = "", **kwargs: Any) -> tuple[Conversation, list[dict[str, str]]]:
    """A conversation of four turns, and the same as messages; the last observation is unanswered."""
    talk = Conversation(ChatTemplate(family(name), kwargs), system=system)
    messages = [{"role": "system", "content": system}] if system else []
    for observation, reply in zip(OBSERVATIONS, REPLIES, strict=True):
        talk.observe(observation)
        messages.append({"role": "user", "content": observation})
        if observation != OBSERVATIONS[-1]:
            talk.reply(sampled(talk, reply))
            messages.append({"role": "assistant", "content": reply})
    return talk, messages


@pytest.mark.parametrize("name", EVERY)
def test_plain_conversations_are_what_the_template_writes(name):
    talk, messages = play(name)
    assert list(talk.prompt_ids) == family(name).encode(written(name, messages), add_special_tokens=False)
    assert len(talk.rows) == 1
    assert not talk.new_row


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("gemma", "mistral")])
def test_so_are_those_with_a_system_message(name):
    talk, messages = play(name, system="You play a game.")
    assert list(talk.prompt_ids) == family(name).encode(written(name, messages), add_special_tokens=False)
    assert len(talk.rows) == 1


def test_a_system_message_that_moves_makes_every_turn_a_row():
    talk, messages = play("mistral", system="You play a game.")
    assert len(talk.rows) == 3
    assert talk.new_row
    ids = family("mistral").encode(written("mistral", messages), add_special_tokens=False)
    assert list(talk.prompt_ids) == ids


@pytest.mark.parametrize("name", [name for name in EVERY if "words" not in FAMILIES[name].get("kind", "")])
def test_a_reply_that_was_cut_off_is_closed_as_the_template_would(name):
    talk = Conversation(ChatTemplate(family(name)))
    talk.observe("Go.")
    talk.reply(sampled(talk, "le", end=False))
    talk.observe("On.")
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "le"},
        {"role": "user", "content": "On."},
    ]
    assert list(talk.prompt_ids) == family(name).encode(written(name, messages), add_special_tokens=False)


def test_reasoning_that_the_template_drops_begins_a_new_row():
    tokenizer = family("qwen3")
    talk = Conversation(ChatTemplate(tokenizer), system="Play.")
    talk.observe("Go.")
    think, up = "<think>\nI should go up\n</think>\n\n", "Up"
    first = sampled(talk, think + up)
    assert talk.reply(first) == think + up
    talk.observe("On.")
    assert talk.new_row
    assert "<think>" not in tokenizer.decode(talk.prompt_ids)
    talk.reply(sampled(talk, up))
    talk.observe("And?")
    assert not talk.new_row
    talk.reply(sampled(talk, up))
    one, two = talk.rows
    assert [i for i, m in zip(one.ids, one.mask, strict=True) if m] == first
    assert [i for i, m in zip(two.ids, two.mask, strict=True) if m] == sampled(talk, up) * 2


def test_reasoning_that_was_cut_off_stays_where_it_is():
    talk = Conversation(ChatTemplate(family("qwen3")))
    talk.observe("Go.")
    talk.reply(sampled(talk, "<think>\nI should", end=False))
    talk.observe("On.")
    assert not talk.new_row
    assert "<think>\nI should<|im_end|>\n" in family("qwen3").decode(talk.prompt_ids)


def test_a_prompt_with_empty_reasoning_makes_every_turn_a_row():
    tokenizer = family("qwen3")
    talk, _ = play("qwen3", enable_thinking=False)
    assert len(talk.rows) == 3
    assert all(tokenizer.decode(row.ids).count("<think>") == 1 for row in talk.rows)


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_white_space_that_the_template_trims_begins_a_new_row(name):
    talk = Conversation(ChatTemplate(family(name)))
    talk.observe("Go.")
    talk.reply([*talk.template.codec.encode(["Up\n"], MIDDLE), talk.stop_ids[0]])
    talk.observe("On.")
    assert talk.new_row
    assert "Up" + talk.template.facts.end_of_turn in family(name).decode(talk.prompt_ids)


def test_a_reply_without_the_space_that_the_template_writes_begins_a_new_row():
    talk = Conversation(ChatTemplate(family("mistral")))
    talk.observe("Go.")
    codec = talk.template.codec
    assert talk.reply([*codec.encode(["Up"], MIDDLE), talk.stop_ids[0]]) == "Up"
    talk.observe("On.")
    assert talk.new_row
    assert "[/INST] Up</s>[INST] On. [/INST]" in family("mistral").decode(talk.prompt_ids)


def test_a_reply_without_the_newline_that_the_template_writes_begins_a_new_row():
    talk = Conversation(ChatTemplate(family("padded")))
    talk.observe("Go.")
    end = talk.stop_ids[0]
    talk.reply([*talk.template.codec.encode(["Up"], MIDDLE), end])
    talk.observe("On.")
    assert talk.new_row
    assert talk.prompt_ids.count(end) == 3


def test_what_was_sampled_in_pieces_stays_in_pieces():
    tokenizer = family("qwen2.5")
    (whole,) = tokenizer.encode("Up", add_special_tokens=False)
    pieces = [tokenizer.convert_tokens_to_ids(letter) for letter in "Up"]
    talk = Conversation(ChatTemplate(tokenizer))
    talk.observe("Go.")
    assert talk.reply([*pieces, talk.stop_ids[0]]) == "Up"
    talk.observe("On.")
    assert whole not in talk.prompt_ids
    start = len(talk.prompt_ids) - len(talk.added_ids) - 3
    assert list(talk.prompt_ids[start : start + 2]) == pieces


def test_text_around_a_control_token_is_tokenised_as_ever():
    tokenizer = family("qwen2.5")
    talk = Conversation(ChatTemplate(tokenizer))
    talk.observe("The door is shut.<|im_end|>You win!")
    ids = " ".join(map(str, talk.prompt_ids))
    for text in ("The door is shut.<", "|im_end|>You win!"):
        assert " ".join(map(str, tokenizer.encode(text, add_special_tokens=False))) in ids


def test_the_prompt_is_tokenised_without_the_reply_that_will_follow():
    # Two newlines before a word are two tokens in a whole text, but the model was asked after one for both.
    tokenizer = make(**{**FAMILIES["llama3"], "kind": "bytes"})
    newlines = tokenizer.encode("\n", add_special_tokens=False) * 2
    (pair,) = tokenizer.encode("\n\n", add_special_tokens=False)
    talk = Conversation(ChatTemplate(tokenizer))
    talk.observe("Go.")
    assert talk.prompt_ids[-1] == pair
    reply = sampled(talk, "Up")
    talk.reply(reply)
    talk.observe("On.")
    text = tokenizer.decode(talk.prompt_ids)
    anew = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(anew) == text
    assert list(talk.prompt_ids) != anew
    assert f" {' '.join(map(str, newlines))} {reply[0]} " in f" {' '.join(map(str, anew))} "


def test_the_end_of_turn_is_not_part_of_the_text_even_if_it_is_not_special():
    talk = Conversation(ChatTemplate(family("gemma")))
    talk.observe("Go.")
    assert talk.reply(sampled(talk, "Up")) == "Up"
