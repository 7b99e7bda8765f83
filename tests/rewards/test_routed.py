"""Rewards of their own for environments of a mixture."""

import asyncio
from dataclasses import replace

from rollgym.core.types import Episode, EpisodeSpec, Failure, Outcome, Turn
from rollgym.rewards.composite import CompositeScorer, score_episode
from rollgym.rewards.routed import RoutedScorer
from rollgym.rewards.scoring import Score


class Fixed:
    """Gives every episode the same score, and remembers whether it was closed."""

    def __init__(self, score: float) -> None:
        self.value, self.closed = score, False

    async def score(self, episode: Episode) -> Score:
        return Score(self.value)

    async def close(self) -> None:
        self.closed = True


def episode(env_id: str) -> Episode:
    return Episode(
        spec=EpisodeSpec(episode_id="e", env_id=env_id),
        outcome=Outcome.TERMINATED,
        turns=(Turn(observation="", action="", reward=1.0, terminated=True),),
        success=True,
    )


def test_each_episode_is_scored_by_its_own_scorer_only() -> None:
    one, two = Fixed(0.5), Fixed(0.25)
    routed = RoutedScorer(
        [
            (lambda played: played.spec.env_id == "a", CompositeScorer({"one": one})),
            (lambda played: played.spec.env_id == "b", CompositeScorer({"two": two})),
        ]
    )

    async def totals() -> list[float]:
        scored = [await score_episode(routed, episode(env_id)) for env_id in "abc"]
        assert scored[0].turns[-1].info["rewards"] == {"environment": 1.0, "one": 0.5}
        assert scored[2] == episode("c")
        assert (await routed.score(episode("c"))).reward == 0.0
        assert (await routed.score(episode("b"))).reward == 0.25
        await routed.close()
        return [each.total_reward for each in scored]

    assert asyncio.run(totals()) == [1.5, 1.25, 1.0]
    assert one.closed
    assert two.closed


def test_failed_episodes_stay_as_they_are() -> None:
    routed = RoutedScorer([(lambda played: True, CompositeScorer({"one": Fixed(0.5)}))])
    failed = replace(
        episode("a"),
        outcome=Outcome.ENV_ERROR,
        error=Failure(type="EnvError", message="broken"),
        success=None,
    )
    assert asyncio.run(score_episode(routed, failed)) == failed
