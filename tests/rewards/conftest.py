"""Shared parts of the reward tests: an episode, and scripted scorers."""

import asyncio
from typing import Any

import pytest

from rollgym.core.types import Episode, EpisodeSpec, Outcome, Turn
from rollgym.rewards import Score


class Kit:
    """Helpers, as one fixture."""

    @staticmethod
    def episode(
        *rewards: float, outcome: Outcome = Outcome.TERMINATED, name: str = "e", **changes: Any
    ) -> Episode:
        """An episode with these rewards, one for each turn."""
        given = rewards or (1.0, 2.0)
        turns = tuple(
            Turn(
                observation=f"saw {number}",
                action="yes",
                reward=reward,
                terminated=outcome is Outcome.TERMINATED and number == len(given) - 1,
                info={"success": True, "turn": number},
            )
            for number, reward in enumerate(given)
        )
        values: dict[str, Any] = {
            "spec": EpisodeSpec(episode_id=name, env_id="faulty:Counting", task=4, sampling_seed=7),
            "outcome": outcome,
            "turns": turns,
            "instructions": "Say yes.",
            "final_observation": "the end",
            "success": None if outcome.failed else True,
        }
        return Episode(**{**values, **changes})


class Says:
    """A scorer that waits, then gives its answer or raises it; it notes who was cancelled."""

    def __init__(self, answer: Any = 1.0, seconds: float = 0.0) -> None:
        self.answer = Score(answer) if isinstance(answer, float) else answer
        self.seconds = seconds
        self.asked: list[Episode] = []
        self.cancelled = 0
        self.closed = 0

    async def score(self, episode: Episode) -> Score:
        self.asked.append(episode)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        answer: Any = self.answer(episode) if callable(self.answer) else self.answer
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def kit() -> type[Kit]:
    return Kit


@pytest.fixture
def says() -> type[Says]:
    return Says
