"""Changes of the history: stripped reasoning, dropped turns, truncated observations."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from recorded_conversation import RecordedConversation
from spelt import END, Spelt, chatml, spell

from rollgym.agents.policy.agent import PolicyAgent
from rollgym.agents.policy.options import PolicyOptions
from rollgym.agents.prompt_builder import PromptBuilder
from rollgym.chat import ChatTemplate
from rollgym.core.agent import AgentAction, Briefing
from rollgym.core.errors import ContextFull, UsageError
from rollgym.core.types import EpisodeSpec, Outcome
from rollgym.testing import ScriptedEngine

TOLD = "<start>s:Walk.\n\nReply with your action only, and nothing else.<end>\n"


def make(context: int | None = None, **options: Any) -> PromptBuilder:
    settings = PolicyOptions(**{"instructions": False, "max_tokens": 4, **options})
    return PromptBuilder(
        ChatTemplate(Spelt(chatml)), "{instructions}\n\n{format}", settings, "Walk.", context
    )


def exchange(it: PromptBuilder, observation: str, reply: str = "Up") -> tuple[tuple[int, ...], bool]:
    heard = it.observe(observation)
    it.reply((*spell(reply), END))
    return heard


def asked(observation: str) -> str:
    return f"<start>u:{observation}<end>\n<start>a:"


def test_thinking_that_is_kept_stays_in_the_row() -> None:
    it = make(reasoning="keep")
    exchange(it, "a", "<think>hm</think>Up")
    assert exchange(it, "b") == (spell(f"\n{asked('b')}"), False)
    assert it.conversation.prompt_ids == spell(f"{asked('a')}<think>hm</think>Up<end>\n{asked('b')}Up<end>")


def test_thinking_that_is_stripped_begins_a_row_and_the_rest_does_not() -> None:
    it = make(reasoning="strip")
    exchange(it, "a", "<think>hm</think>Up")
    assert exchange(it, "b") == (spell(f"{asked('a')}Up<end>\n{asked('b')}"), True)
    assert exchange(it, "c") == (spell(f"\n{asked('c')}"), False)


def test_the_turn_itself_keeps_the_tokens_that_were_sampled() -> None:
    ids = (*spell("<think>hm</think>Up"), END)
    replies = iter([ids, (*spell("Up"), END)])
    engine = ScriptedEngine(lambda request: next(replies))
    first, second = play(engine, "a", "b", reasoning="strip")
    assert (first.action, first.action_ids, len(first.logprobs)) == ("Up", ids, len(ids))
    assert (second.new_row, second.prompt_ids) == (True, spell(f"{asked('a')}Up<end>\n{asked('b')}"))
    assert engine.requests[1].prompt_ids == second.prompt_ids


def play(engine: ScriptedEngine, *observations: str, **options: Any) -> list[AgentAction]:
    policy = PolicyAgent(
        engine, Spelt(), PolicyOptions(**{"instructions": False, "max_tokens": 32, **options})
    )

    async def episode() -> list[AgentAction]:
        spec = EpisodeSpec(episode_id="e1", env_id="test/Env-v0")
        player = policy.player(Briefing(spec=spec, instructions="Walk."))
        return [await player.act(observation, {}) for observation in observations]

    return asyncio.run(episode())


ONE = len(spell(f"{asked('a')}Up<end>\n"))
"""Ids of a whole exchange of one letter."""


def test_the_older_half_of_the_turns_is_dropped_where_a_whole_reply_no_longer_fits() -> None:
    # Four exchanges, the fifth observation and a reply of four tokens are one token too many.
    room = 4 * ONE + len(spell(asked("e"))) + 4
    fits, tight = make(room, overflow="drop_oldest"), make(room - 1, overflow="drop_oldest")
    for it in (fits, tight):
        for observation in "abcd":
            exchange(it, observation)
    assert exchange(fits, "e") == (spell(f"\n{asked('e')}"), False)
    assert exchange(tight, "e") == (spell(f"{asked('c')}Up<end>\n{asked('d')}Up<end>\n{asked('e')}"), True)
    assert (fits.dropped_turns, tight.dropped_turns) == (0, 2)
    assert exchange(tight, "f") == (spell(f"\n{asked('f')}"), False)


@pytest.mark.parametrize("system", [True, False])
def test_the_instructions_stay_when_turns_are_dropped(system: bool) -> None:
    it = make(len(spell(TOLD)) + 3 * ONE + 4, overflow="drop_oldest", instructions=True, system=system)
    for observation in "abcd":
        heard, new_row = exchange(it, observation)
    prompt = spell(TOLD) if system else spell("<start>u:Walk.\n\nReply with your action only")
    assert new_row
    assert heard[: len(prompt)] == prompt


def test_every_reply_is_in_one_row_with_what_it_was_sampled_from() -> None:
    """Rows put together from the moves are what the engine was asked with, token by token."""
    engine = ScriptedEngine([*b"Up", END], context_length=4 * ONE)
    moves = play(engine, *"abcdefgh", overflow="drop_oldest", max_tokens=4)
    assert 1 < sum(move.new_row for move in moves) < len(moves) - 1
    row: list[int] = []
    for move, request in zip(moves, engine.requests, strict=True):
        row = [*([] if move.new_row else row), *move.prompt_ids]
        assert tuple(row) == request.prompt_ids
        assert len(row) + 4 <= 4 * ONE
        row += move.action_ids


def test_an_observation_that_is_too_long_loses_its_middle_and_no_more_than_needed() -> None:
    it = make(100, overflow="truncate_observation")
    heard, new_row = exchange(it, "first" + "x" * 200 + "last")
    text = "".join(map(chr, heard[3:-5]))
    assert not new_row
    assert text.startswith("firstx")
    assert text.endswith("xlast")
    left_out = 209 - len(text) + len("\n[148 characters left out]\n")
    assert f"x\n[{left_out} characters left out]\nx" in text
    assert len(heard) + 4 == 100
    assert it.cut_observations == 1
    unlimited = make(None, overflow="truncate_observation")
    assert len(exchange(unlimited, "x" * 200)[0]) > 200


def test_a_cut_observation_goes_on_in_the_same_row() -> None:
    it = make(ONE + 70, overflow="truncate_observation")
    exchange(it, "a")
    heard, new_row = exchange(it, "b" * 300)
    assert not new_row
    assert it.conversation.prompt_ids[:ONE] == spell(f"{asked('a')}Up<end>\n")
    assert heard[0] == ord("\n")


@pytest.mark.parametrize("overflow", ["stop", "drop_oldest", "truncate_observation"])
def test_where_nothing_helps_the_episode_ends_as_a_full_context(overflow: str) -> None:
    with pytest.raises(ContextFull, match="leaves no room for a reply"):
        play(ScriptedEngine([END], context_length=8), "x" * 50, overflow=overflow)


@pytest.mark.parametrize(("name", "value"), [("overflow", "drop"), ("reasoning", "hide")])
def test_an_unknown_choice_is_rejected(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} must be .*, not '{value}'"):
        PolicyOptions(**{name: value})


@pytest.mark.parametrize("overflow", ["drop_oldest", "stop"])
def test_rows_of_a_real_model_score_as_they_were_sampled(overflow: str, tmp_path: Path) -> None:
    """The trainer's log-probs of every action token, row by row, are those the engine drew it with."""
    pytest.importorskip("transformers")
    import numpy as np
    import torch

    from rollgym.core.agent import AgentSetup, make_agent
    from rollgym.pool.inline import InlinePool
    from rollgym.rollout.episode_runner import run_episode
    from rollgym.trainer.builtin_policy.model import make_policy
    from rollgym.trainer.data.sequences import token_episode

    env = "rollgym/FrozenLake-v0"
    folder = make_policy([env], tmp_path / "tiny", size="tiny", context=256).path

    async def episode() -> Any:
        agent = make_agent(
            "lm", AgentSetup(env_id=env), model=str(folder), max_tokens=4, overflow=overflow, device="cpu"
        )
        pool = InlinePool()
        try:
            return await run_episode(EpisodeSpec(episode_id="e", env_id=env, task=1), pool, agent)
        finally:
            await agent.close()
            await pool.close()

    played = asyncio.run(episode())
    recorded = token_episode(played)
    assert played.outcome is (Outcome.TOKEN_LIMIT if overflow == "stop" else Outcome.TRUNCATED)
    assert (len(recorded.sequences) > 1) == (overflow == "drop_oldest")
    from rollgym.engines.embedded.model import read_module

    model: Any = read_module(folder)
    scored: list[float] = []
    for sequence in recorded.sequences:
        with torch.no_grad():
            logprobs = model(torch.tensor(sequence.ids)[None]).logits[0].float().log_softmax(-1)
        scored += [
            float(logprobs[position - 1, sequence.ids[position]]) for position in sequence.action_positions
        ]
    assert np.abs(np.array(scored) - recorded.behavior).max() < 1e-4


def test_format_examples_are_not_sampled_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgym.agents.prompt_builder.Conversation", RecordedConversation)
    it: Any = make(format_examples=2, parser="answer|listed")
    heard, new_row = it.observe("a", {"actions": ["Up", "Down", "Left"]})
    examples = "".join(
        f"<start>u:This is practice. Play {action}.<end>\n<start>a:<answer>{action}</answer><end>\n"
        for action in ("Up", "Down")
    )
    assert (heard, new_row) == (spell(f"{examples}{asked('a')}"), False)
    it.reply((*spell("Up"), END))
    assert it.observe("b", {}) == (spell(f"\n{asked('b')}"), False)
    assert sum(it.conversation.rows[0].mask) == 3
    none = make(format_examples=2)
    assert none.observe("a", {}) == (spell(asked("a")), False)


def test_format_examples_precede_every_turn_without_history() -> None:
    it = make(format_examples=1, history="none")
    examples = "<start>u:This is practice. Play Up.<end>\n<start>a:Up<end>\n"
    for turn, observation in enumerate("ab"):
        heard = it.observe(observation, {"actions": ["Up"]})
        assert heard == (spell(f"{examples}{asked(observation)}"), turn > 0)
        it.reply((*spell("Up"), END))


def test_a_reminder_ends_each_observation() -> None:
    it = make(format_reminder=True, parser="listed|raw")
    reminder = "Reply with one of the actions you are given, and nothing else."
    heard, _ = it.observe("a", {"actions": ["Up", "Down"]})
    assert heard == spell(asked(f"a\n\nActions: Up, Down. {reminder}"))
    it.reply((*spell("Up"), END))
    many = it.observe("b", {"actions": [str(number) for number in range(13)]})
    assert many[0] == spell(f"\n{asked('b' + chr(10) * 2 + reminder)}")
