"""Prompts of an episode: instructions, history and the encoding of replies."""

from typing import Any

import pytest
from spelt import END, Spelt, chatml, spell

from rollgym.agents.policy.options import PolicyOptions
from rollgym.agents.prompt_builder import PromptBuilder
from rollgym.chat import ChatTemplate
from rollgym.core.errors import AgentError

TOLD = "Walk.\n\nReply with your action only, and nothing else."


def make(render: Any = chatml, **options: Any) -> PromptBuilder:
    return PromptBuilder(
        ChatTemplate(Spelt(render)), "{instructions}\n\n{format}", PolicyOptions(**options), "Walk."
    )


def exchange(it: PromptBuilder, observation: str, reply: bytes = b"Up") -> tuple[tuple[int, ...], bool]:
    heard = it.observe(observation)
    it.reply((*reply, END))
    return heard


def test_turns_add_to_one_conversation() -> None:
    it = make()
    assert exchange(it, "a") == (spell(f"<start>s:{TOLD}<end>\n<start>u:a<end>\n<start>a:"), False)
    assert exchange(it, "b") == (spell("\n<start>u:b<end>\n<start>a:"), False)
    assert it.turn == 2


def test_without_history_each_turn_is_a_separate_conversation_and_row() -> None:
    it = make(history="none")
    assert exchange(it, "a") == (spell(f"<start>s:{TOLD}<end>\n<start>u:a<end>\n<start>a:"), False)
    assert exchange(it, "b") == (spell(f"<start>s:{TOLD}<end>\n<start>u:b<end>\n<start>a:"), True)
    assert exchange(it, "b")[1]


def test_with_a_history_of_actions_earlier_replies_follow_the_observation() -> None:
    it = make(history="actions", format_reminder=True)
    reminder = "\n\nReply with your action only, and nothing else."

    def prompt(text: str) -> tuple[int, ...]:
        return spell(f"<start>s:{TOLD}<end>\n<start>u:{text}{reminder}<end>\n<start>a:")

    assert exchange(it, "a") == (prompt("a"), False)
    assert exchange(it, "b", b"<think>hm</think> Left") == (prompt("b\n\nYour actions so far: Up."), True)
    assert exchange(it, "c") == (prompt("c\n\nYour actions so far: Up, Left."), True)


@pytest.mark.parametrize("history", ["full", "none"])
def test_instructions_lead_the_first_observation_where_there_is_no_system_message(history: str) -> None:
    it = make(system=False, history=history)
    assert exchange(it, "a") == (spell(f"<start>u:{TOLD}\n\na<end>\n<start>a:"), False)
    second = (
        spell("\n<start>u:b<end>\n<start>a:")
        if history == "full"
        else spell(f"<start>u:{TOLD}\n\nb<end>\n<start>a:")
    )
    assert exchange(it, "b") == (second, history == "none")


@pytest.mark.parametrize("system", [True, False])
def test_instructions_can_be_left_out(system: bool) -> None:
    assert make(instructions=False, system=system).observe("a")[0] == spell("<start>u:a<end>\n<start>a:")


def test_a_template_that_rewrites_history_begins_a_row() -> None:
    def changing(messages: list[dict[str, str]], add_generation_prompt: bool, **kwargs: Any) -> str:
        short = [
            {**m, "content": m["content"].split("|")[-1]} if m["role"] == "assistant" else m for m in messages
        ]
        return chatml(short, add_generation_prompt)

    it = make(changing, instructions=False)
    exchange(it, "a", b"hm|Up")
    added, anew = it.observe("b")
    assert anew
    assert added == spell("<start>u:a<end>\n<start>a:Up<end>\n<start>u:b<end>\n<start>a:")


def test_a_reply_is_encoded_as_the_model_would_sample_it() -> None:
    it = make()
    it.observe("a")
    ids = it.encode_reply("Up")
    assert ids == (*b"Up", END)
    assert it.reply(ids) == "Up"


def test_a_conversation_that_cannot_go_on_is_the_agents_error() -> None:
    it = make()
    it.observe("a")
    with pytest.raises(AgentError, match="The conversation cannot continue: .*alternate"):
        it.observe("b")
    assert it.turn == 0
