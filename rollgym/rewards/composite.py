"""Several scorers as one, and adding a score to its episode."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from rollgym.core.errors import RewardError, RollgymError, UsageError, one_line
from rollgym.core.failures import failure_of
from rollgym.core.roles import main_role
from rollgym.core.serialization import clean_text
from rollgym.core.types import Episode, Failure, Turn
from rollgym.rewards.scoring import Score, Scorer

ENVIRONMENT = "environment"
"""The name of the environment's own reward."""
STOP_SECONDS = 5.0
"""Seconds that cancelled scorers may take to stop; after that they are abandoned."""


class CompositeScorer:
    """Scorers by name, each with a weight, run at once; the first that fails is the failure of all.

    Args:
        scorers: A scorer, or a pair of one and its weight (1 where there is none), by name. With weight 0 a
            score is recorded and not rewarded.
        keep_environment: Whether the environment's rewards count too; otherwise they are only recorded.
        timeout: Seconds for all of them together, queues included. The built-in scorers have their
            own timeouts.
    """

    def __init__(
        self,
        scorers: Mapping[str, Scorer | tuple[Scorer, float]],
        *,
        keep_environment: bool = True,
        timeout: float | None = None,
    ) -> None:
        pairs = {name: item if isinstance(item, tuple) else (item, 1.0) for name, item in scorers.items()}
        self.scorers = {name: scorer for name, (scorer, _) in pairs.items()}
        self.weights = {name: _checked_weight(name, weight) for name, (_, weight) in pairs.items()}
        self.keep_environment = keep_environment
        self.timeout = timeout
        self._check()

    def _check(self) -> None:
        if not self.scorers:
            raise UsageError("A weighted reward needs at least one scorer.")
        for name, scorer in self.scorers.items():
            if not name or name == ENVIRONMENT:
                raise UsageError(f"A scorer needs a name other than {ENVIRONMENT!r}, not {name!r}.")
            if isinstance(scorer, CompositeScorer) and not scorer.keep_environment:
                raise UsageError(
                    f"The scorer {name!r} cannot replace the environment's reward from inside another: "
                    "set keep_environment=False on the outer one."
                )
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise UsageError(f"A timeout must be positive and finite, not {self.timeout}.")

    async def score(self, episode: Episode) -> Score:
        """The weighted sum; its parts are what each scorer adds to it."""
        return self._combine(await self.scores(episode))

    async def scores(self, episode: Episode) -> dict[str, Score]:
        """Score with each scorer, in the given order."""
        tasks = {
            name: asyncio.create_task(_ask(name, scorer, episode)) for name, scorer in self.scorers.items()
        }
        for task in tasks.values():
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, even if late
        late: set[asyncio.Task[Score]] = set(tasks.values())
        try:
            _, late = await asyncio.wait(late, timeout=self.timeout, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=STOP_SECONDS)
        # In the given order, so that of two failures always the same one is reported.
        for task in tasks.values():
            if task not in late and (error := task.exception()) is not None:
                raise error
        for name, task in tasks.items():
            if task in late:
                raise name_error(name, RewardError(f"took longer than {self.timeout:g} s"))
        return {name: task.result() for name, task in tasks.items()}

    async def add_to(self, episode: Episode) -> Episode:
        """The episode with its score: in the rewards, in ``info["rewards"]`` and in its success."""
        scores = await self.scores(episode)
        total = self._combine(scores)
        turns = (
            list(episode.turns) if self.keep_environment else [_replaced(t, episode) for t in episode.turns]
        )
        last, own = turns[-1], episode.turns[-1].reward
        details = {name: self._detail(name, score) for name, score in scores.items()}
        info = {"rewards": {ENVIRONMENT: own, **total.parts}, "reward_details": details}
        kept = [own] if self.keep_environment else []
        reward = math.fsum([*kept, *total.parts.values()])
        turns[-1] = replace(_with_reward(last, reward, episode), info={**last.info, **info})
        success = episode.success if total.success is None else total.success
        return replace(episode, turns=tuple(turns), success=success)

    async def close(self) -> None:
        """Close every scorer that can be closed, whatever the others do."""
        async with AsyncExitStack() as stack:
            for scorer in self.scorers.values():
                close = getattr(scorer, "close", None)
                if close is not None:
                    stack.push_async_callback(close)

    def _combine(self, scores: Mapping[str, Score]) -> Score:
        parts = {name: self.weights[name] * score.reward for name, score in scores.items()}
        verdicts = [score.success for score in scores.values() if score.success is not None]
        notes = [f"{name}: {score.note}" for name, score in scores.items() if score.note]
        # fsum: the sum does not depend on the order.
        return Score(math.fsum(parts.values()), all(verdicts) if verdicts else None, parts, "; ".join(notes))

    def _detail(self, name: str, score: Score) -> dict[str, Any]:
        optional = {"parts": score.parts or None, "note": score.note or None, "success": score.success}
        given = {key: value for key, value in optional.items() if value is not None}
        return {"score": score.reward, "weight": self.weights[name], **given}


async def score_episode(scorer: Scorer, episode: Episode) -> Episode:
    """Return the episode with the score of any scorer; raise a `RewardError` that names it otherwise.

    Episodes without turns, and failed ones, stay as they are.
    """
    if episode.outcome.failed or not episode.turns:
        return episode
    from rollgym.rewards.routed import RoutedScorer  # which imports this module

    if isinstance(scorer, RoutedScorer):
        own = scorer.route(episode)
        if own is None:
            return episode
        scorer = own
    name = str(getattr(scorer, "name", "") or type(scorer).__name__)
    weighted = scorer if isinstance(scorer, CompositeScorer) else CompositeScorer({name: scorer})
    try:
        return await weighted.add_to(episode)
    except RewardError:
        raise
    except Exception as error:
        raise name_error(name, error) from error


def name_error(name: str, error: BaseException) -> RewardError:
    """Return an error of a scorer as a `RewardError` that names it."""
    reason = str(error) if isinstance(error, RollgymError) else one_line(error)
    named = RewardError(f"reward {name!r}: {reason}")
    named.__cause__ = error
    named.failure = Failure(
        type="RewardError", message=clean_text(str(named)), traceback=failure_of(error).traceback
    )
    return named


async def _ask(name: str, scorer: Scorer, episode: Episode) -> Score:
    """Return one scorer's score; errors, and cancellations from within the scorer, get its name."""
    try:
        score = await scorer.score(episode)
        if not isinstance(score, Score):
            raise TypeError(f"a scorer must return a Score, not a {type(score).__name__}")
    except asyncio.CancelledError as stray:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise name_error(name, RewardError("it was cancelled from within")) from stray
    except Exception as error:
        raise name_error(name, error) from error
    return score


def _replaced(turn: Turn, episode: Episode) -> Turn:
    """Return the turn without the environment's reward, which stays in its info."""
    info = {**turn.info, "rewards": {ENVIRONMENT: turn.reward}}
    return replace(_with_reward(turn, 0.0, episode), info=info)


def _with_reward(turn: Turn, reward: float, episode: Episode) -> Turn:
    """Return the turn with another reward of the episode's role; the rewards of other roles stay."""
    rewards = {**turn.rewards, main_role(episode): reward} if episode.roles else {}
    return replace(turn, reward=reward, rewards=rewards)


def _checked_weight(name: str, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise UsageError(f"The weight of the scorer {name!r} must be a finite number, not {weight!r}.")
    return float(weight)
