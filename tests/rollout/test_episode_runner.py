"""One episode: every way it can end is an outcome, never an exception."""

import asyncio

import pytest

from rollgym.core.agent import Agent, AgentSetup, make_agent
from rollgym.core.types import Episode, EpisodeSpec, Limits, Outcome
from rollgym.pool.inline import InlinePool
from rollgym.rollout.episode_runner import run_episode


def play(env: str, agent: str = "faulty:Yes", limits: Limits | None = None) -> Episode:
    async def go() -> Episode:
        pool = InlinePool()
        player: Agent = make_agent(agent, AgentSetup(env_id=env))
        spec = EpisodeSpec(
            episode_id="e", env_id=env, task=4, split="test", env_seed=3, limits=limits or Limits()
        )
        try:
            return await run_episode(spec, pool, player)
        finally:
            await pool.close()

    return asyncio.run(go())


def test_a_whole_episode_is_recorded_turn_by_turn() -> None:
    episode = play("faulty:Counting")
    assert episode.outcome is Outcome.TERMINATED
    assert [turn.action for turn in episode.turns] == ["yes"] * 3
    assert [turn.reward for turn in episode.turns] == [1.0, 1.0, 1.0]
    assert episode.turns[0].observation.startswith("task 4 luck ")
    assert [turn.observation for turn in episode.turns[1:]] == ["turn 1", "turn 2"]
    assert episode.final_observation == "turn 3"
    assert (episode.total_reward, episode.success, episode.length) == (3.0, True, 3)
    assert episode.reset_info["task"] == 4
    assert episode.error is None


@pytest.mark.parametrize(
    ("env", "agent", "limits", "outcome", "error", "turns"),
    [
        ("faulty:RaisesInReset", "faulty:Yes", Limits(), Outcome.ENV_ERROR, "RuntimeError", 0),
        ("faulty:RaisesInStep", "faulty:Yes", Limits(), Outcome.ENV_ERROR, "ZeroDivisionError", 1),
        ("faulty:NotANumber", "faulty:Yes", Limits(), Outcome.ENV_ERROR, "EnvError", 0),
        ("faulty:Counting", "faulty:Quarrelsome", Limits(), Outcome.ENGINE_ERROR, "KeyError", 1),
        ("faulty:Counting", "faulty:says_seven", Limits(), Outcome.ENGINE_ERROR, "TypeError", 0),
        ("faulty:NeverEnds", "faulty:Yes", Limits(turns=5), Outcome.TURN_LIMIT, None, 5),
        ("faulty:Counting", "faulty:Yes", Limits(turns=3), Outcome.TERMINATED, None, 3),
    ],
)
def test_every_end_is_an_outcome(
    env: str, agent: str, limits: Limits, outcome: Outcome, error: str | None, turns: int
) -> None:
    episode = play(env, agent, limits)
    assert episode.outcome is outcome
    assert (episode.error.type if episode.error else None) == error
    assert episode.length == turns
    if outcome.failed:
        assert episode.success is None


def test_a_time_limit_ends_an_endless_episode() -> None:
    episode = play("faulty:NeverEnds", "slow_agent:dawdle", Limits(seconds=0.3))
    assert episode.outcome is Outcome.TIME_LIMIT
    assert episode.success is False


def test_a_failure_has_its_origin_and_traceback() -> None:
    episode = play("faulty:RaisesInReset")
    assert episode.error is not None
    assert episode.error.message == "faulty:RaisesInReset raised in reset(): RuntimeError: the shop is closed"
    assert "in begin" in episode.error.traceback
