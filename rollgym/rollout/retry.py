"""Retry rules, one set for training, evaluation and demonstrations.

An episode is *lost to infrastructure* when its worker, engine, server or node went away through no fault of
the episode (`Failure.infrastructure`). Every other unsuccessful end is a failure of the episode itself. The
two kinds are counted separately, because one dead machine can take many good episodes with it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, Outcome

RETRIED = frozenset({Outcome.TIME_LIMIT, Outcome.ENV_ERROR, Outcome.WORKER_LOST, Outcome.ENGINE_ERROR})
"""The outcomes that are retried by default."""

LossKind = Literal["infrastructure", "failure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The outcomes that are retried, and how often.

    Example:
        >>> RetryPolicy(max_retries=2, max_infra_retries=64)  # a group of training episodes
        >>> RetryPolicy(max_infra_retries=64)  # one evaluation episode during training
        >>> RetryPolicy(max_retries=2, outcomes={Outcome.WORKER_LOST})  # one episode of `rollgym eval`
    """

    max_retries: int = 0
    """Retries after failures of the episode itself."""
    max_infra_retries: int | None = None
    """Retries after infrastructure losses; ``None`` counts them against ``max_retries``."""
    outcomes: Set[Outcome] = RETRIED
    """Outcomes that may be retried; all others are final."""

    def __post_init__(self) -> None:
        if self.max_retries < 0 or (self.max_infra_retries or 0) < 0:
            raise UsageError(f"max_retries and max_infra_retries must be >= 0, got {self}.")


NO_RETRIES = RetryPolicy()


class RetryBudget:
    """The retries left under a policy, for one group or for one episode."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.retries_left = policy.max_retries
        self.infra_retries_left = policy.max_infra_retries
        self._outcomes = policy.outcomes

    def spend(self, episode: Episode) -> LossKind | None:
        """Take one retry for an episode that ended.

        Returns:
            The kind of loss that is retried, or ``None`` if the episode is final.
        """
        if episode.outcome not in self._outcomes:
            return None
        lost = lost_to_infrastructure(episode)
        if lost and self.infra_retries_left is not None:
            if self.infra_retries_left <= 0:
                return None
            self.infra_retries_left -= 1
        elif self.retries_left <= 0:
            return None
        else:
            self.retries_left -= 1
        return "infrastructure" if lost else "failure"


def lost_to_infrastructure(episode: Episode) -> bool:
    """Return whether an episode was lost with its worker, engine, server or node."""
    return episode.error is not None and episode.error.infrastructure
