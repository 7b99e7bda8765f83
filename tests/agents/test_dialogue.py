"""A model's side of an episode: what it is told, in which conversation, and how a reply is spelt."""

from typing import Any

import pytest
from spelt import END, Spelt, chatml, spell

from rollgym.agents.dialogue import Dialogue
from rollgym.agents.lm_options import LmOptions
from rollgym.chat import ChatTemplate
from rollgym.errors import AgentError

TOLD = "Walk.\n\nReply with your action only, and nothing else."


def make(render: Any = chatml, **options: Any) -> Dialogue:
    return Dialogue(ChatTemplate(Spelt(render)), "{instructions}\n\n{format}", LmOptions(**options), "Walk.")


def exchange(it: Dialogue, observation: str, reply: bytes = b"Up") -> tuple[tuple[int, ...], bool]:
    heard = it.observe(observation)
    it.reply((*reply, END))
    return heard


def test_turns_add_to_one_conversation() -> None:
    it = make()
    assert exchange(it, "a") == (spell(f"<start>s:{TOLD}<end>\n<start>u:a<end>\n<start>a:"), False)
    assert exchange(it, "b") == (spell("\n<start>u:b<end>\n<start>a:"), False)
    assert it.turn == 2


def test_without_memory_each_turn_is_a_conversation_and_a_row_of_its_own() -> None:
    it = make(remember=False)
    assert exchange(it, "a") == (spell(f"<start>s:{TOLD}<end>\n<start>u:a<end>\n<start>a:"), False)
    assert exchange(it, "b") == (spell(f"<start>s:{TOLD}<end>\n<start>u:b<end>\n<start>a:"), True)
    assert exchange(it, "b")[1]


@pytest.mark.parametrize("remember", [True, False])
def test_instructions_lead_the_first_observation_where_there_is_no_system_message(remember: bool) -> None:
    it = make(system=False, remember=remember)
    assert exchange(it, "a") == (spell(f"<start>u:{TOLD}\n\na<end>\n<start>a:"), False)
    second = (
        spell("\n<start>u:b<end>\n<start>a:") if remember else spell(f"<start>u:{TOLD}\n\nb<end>\n<start>a:")
    )
    assert exchange(it, "b") == (second, not remember)


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


def test_a_reply_is_spelt_as_the_model_would_have_to_say_it() -> None:
    it = make()
    it.observe("a")
    ids = it.spell("Up")
    assert ids == (*b"Up", END)
    assert it.reply(ids) == "Up"


def test_a_conversation_that_cannot_go_on_is_the_agents_error() -> None:
    it = make()
    it.observe("a")
    with pytest.raises(AgentError, match="The conversation cannot go on: .*by turns"):
        it.observe("b")
    assert it.turn == 0
