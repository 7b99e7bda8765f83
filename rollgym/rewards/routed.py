"""Different rewards for different environments of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from rollgym.core.types import Episode
from rollgym.rewards.composite import CompositeScorer
from rollgym.rewards.scoring import Score

Route = tuple[Callable[[Episode], bool], CompositeScorer]


class RoutedScorer:
    """Scores each episode with the first scorer whose condition holds; other episodes stay as they are.

    Example:
        >>> tests = CompositeScorer({"tests": FunctionScorer("my_rewards:tests")})
        >>> RoutedScorer([(lambda episode: episode.spec.env_id == "rollgym/Code-v0", tests)])
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)

    def route(self, episode: Episode) -> CompositeScorer | None:
        """The scorer of an episode, or ``None`` where only the environment's reward counts."""
        return next((scorer for applies, scorer in self.routes if applies(episode)), None)

    async def score(self, episode: Episode) -> Score:
        """The score by the episode's scorer; 0 where it has none."""
        scorer = self.route(episode)
        return Score(0.0) if scorer is None else await scorer.score(episode)

    async def close(self) -> None:
        """Close every scorer, whatever the others do."""
        async with AsyncExitStack() as stack:
            for _, scorer in self.routes:
                stack.push_async_callback(scorer.close)
