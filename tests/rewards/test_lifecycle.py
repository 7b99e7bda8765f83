"""Scoring as a part of an episode's life: when it happens, what ends it, what it counts for."""

import asyncio
from typing import Any

import pytest
from virtual import VirtualPlayer, VirtualSession, World, run

from rollgym.core.errors import ContextFull
from rollgym.core.types import Episode, EpisodeSpec, Limits, Outcome
from rollgym.rewards import CompositeScorer, Score
from rollgym.rollout.episode_runner import EpisodeRunner, EpisodeState, run_episode


class Steady(World):
    """Everything takes a second: opened at 1, reset at 2, a turn by 4, closed at 5."""

    async def delay(self, *what: object, most: float = float("inf")) -> None:
        await asyncio.sleep(1.0)


def live(
    scorer: Any, *, cancel_at: float | None = None, limit: float = 1000.0, turns: int = 1
) -> tuple[Episode, World, float, list[str]]:
    """One episode of one turn; also the time it ended and the states it went through."""
    spec = EpisodeSpec(episode_id="e", env_id="env", limits=Limits(seconds=limit))
    told: list[str] = []

    async def main() -> tuple[Episode, World, float, list[str]]:
        loop = asyncio.get_running_loop()
        world = Steady(early=0.0, turns=turns)
        runner = EpisodeRunner(
            spec, world, world, scorer=scorer, on_state=lambda state, *rest: told.append(state.value)
        )
        if cancel_at is not None:
            loop.call_later(cancel_at, runner.cancel)
        episode = await runner.run()
        assert runner.state is EpisodeState.DONE
        assert not world.inside
        assert world.ledger["opened"] == world.ledger["closed"]
        return episode, world, loop.time(), told

    return run(main)


def test_an_episode_is_scored_once_its_environment_is_given_back(says: Any) -> None:
    plain, _, _, before = live(None)
    scorer = says(Score(5.0, success=False), seconds=10.0)
    episode, _, now, told = live(scorer)
    assert told == [*before[:-1], "scoring", "done"]
    assert episode.outcome is plain.outcome is Outcome.TERMINATED
    assert episode.total_reward == plain.total_reward + 5.0
    assert (plain.success, episode.success) == (True, False)
    assert now == 15.0
    (asked,) = scorer.asked
    assert asked.turns[-1].reward == plain.turns[-1].reward
    assert asked.outcome is Outcome.TERMINATED


def test_without_a_scorer_the_scoring_state_is_skipped() -> None:
    assert "scoring" not in live(None)[3]


def test_scoring_counts_against_no_time_limit_of_the_episode(says: Any) -> None:
    episode, _, now, _ = live(says(1.0, seconds=500.0), limit=4.5)
    assert episode.outcome is Outcome.TERMINATED
    assert now == 505.0
    assert "Says" in episode.turns[-1].info["rewards"]


@pytest.mark.parametrize("at", [0.5, 2.5, 3.5])
def test_an_episode_that_is_cancelled_before_is_never_scored(says: Any, at: float) -> None:
    scorer = says(1.0)
    assert live(scorer, cancel_at=at)[0].outcome is Outcome.CANCELLED
    assert not scorer.asked


def test_an_episode_that_is_cancelled_while_it_closes_is_not_scored(says: Any) -> None:
    scorer = says(1.0)
    episode, world, now, _ = live(scorer, cancel_at=4.5)
    assert episode.outcome is Outcome.CANCELLED
    assert now == 5.0
    assert not world.ledger["half closed"]
    assert not scorer.asked


@pytest.mark.parametrize("at", [5.0, 5.5, 7.999])
def test_an_episode_that_is_cancelled_while_it_is_scored_stops_at_once(says: Any, at: float) -> None:
    plain = live(None)[0]
    first, second = says(1.0, seconds=3.0), says(1.0, seconds=9.0)
    episode, _, now, _ = live(CompositeScorer({"a": first, "b": second}), cancel_at=at)
    assert episode.outcome is Outcome.CANCELLED
    assert now == at
    assert first.cancelled == second.cancelled == len(first.asked)
    assert episode.total_reward == plain.total_reward, "a score is added as a whole or not at all"
    assert "rewards" not in episode.turns[-1].info
    assert (episode.success, episode.error) == (None, None)


def test_cancelling_the_caller_stops_scoring_and_raises_as_ever(says: Any) -> None:
    scorer = says(1.0, seconds=100.0)

    async def main() -> None:
        world = Steady(turns=1)
        spec = EpisodeSpec(episode_id="e", env_id="env")
        task = asyncio.create_task(run_episode(spec, world, world, scorer=scorer))
        await asyncio.sleep(20.0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert asyncio.get_running_loop().time() == 20.0

    run(main)
    assert scorer.cancelled == 1


@pytest.mark.parametrize("answer", [ValueError("no key"), 3, asyncio.CancelledError()])
def test_a_scorer_that_fails_makes_the_episode_a_failed_one(says: Any, answer: Any) -> None:
    """rule 10: a missing reward does not count as reward 0."""
    episode = live(says(answer))[0]
    assert episode.outcome is Outcome.ENV_ERROR
    assert episode.error is not None
    assert episode.error.type == "RewardError"
    assert episode.error.message.startswith("reward 'Says': ")
    assert episode.success is None
    assert "rewards" not in episode.turns[-1].info


@pytest.mark.parametrize(
    "where", [(VirtualSession, "step"), (VirtualPlayer, "act"), (VirtualSession, "close")]
)
def test_an_episode_that_failed_is_not_scored(says: Any, where: tuple[type, str]) -> None:
    async def broken(*args: object) -> Any:
        raise KeyError("x")

    scorer = says(1.0)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(*where, broken)
        spec = EpisodeSpec(episode_id="e", env_id="env")

        async def main() -> Episode:
            world = Steady(turns=1)
            return await run_episode(spec, world, world, scorer=scorer)

        episode = run(main)
    assert episode.outcome.failed
    assert episode.error is not None
    assert "KeyError" in episode.error.message
    assert not scorer.asked


@pytest.mark.parametrize(("turns", "limit", "outcome"), [(5, 4.5, "time_limit"), (5, 6.5, "time_limit")])
def test_an_episode_that_was_cut_short_is_scored_like_others(
    says: Any, turns: int, limit: float, outcome: str
) -> None:
    episode = live(says(1.0), limit=limit, turns=turns)[0]
    assert episode.outcome.value == outcome
    assert "Says" in episode.turns[-1].info["rewards"]


def test_an_episode_whose_conversation_is_full_is_scored_too(says: Any) -> None:
    """It ends as token_limit, which is trained on: without its score it would be a different reward."""
    act = VirtualPlayer.act

    async def until_full(self: VirtualPlayer, *what: Any) -> Any:
        if self.turn == 1:
            raise ContextFull("too long")
        return await act(self, *what)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(VirtualPlayer, "act", until_full)
        episode = live(says(1.0), turns=5)[0]
    assert episode.outcome is Outcome.TOKEN_LIMIT
    assert "Says" in episode.turns[-1].info["rewards"]
