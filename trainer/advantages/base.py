"""The estimator type, its registry, and statistics that several estimator families share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rollgym.core.errors import UnknownName, UsageError
from rollgym.trainer.advantages.types import AdvantageConfig, Advantages, FloatArray, Trajectory

Trajectories = Sequence[Trajectory]
EstimatorFunction = Callable[
    [Trajectories, AdvantageConfig], tuple[list[FloatArray], list[FloatArray] | None]
]
MetricsFunction = Callable[[Trajectories], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Estimator:
    """A registered advantage estimator; call it with trajectories and settings.

    Example:
        >>> won = Trajectory(group="g", rewards=[1.0], tokens=[2], terminated=True)
        >>> lost = Trajectory(group="g", rewards=[0.0], tokens=[1], terminated=True)
        >>> [a.tolist() for a in find_estimator("dr_grpo")([won, lost]).advantages]
        [[0.5, 0.5], [-0.5]]
    """

    name: str
    function: EstimatorFunction
    reads: tuple[str, ...]
    centered: bool
    """True if advantages are relative to a group: whitening then does not shift them, and 0 stays 0."""
    extra_metrics: MetricsFunction | None = None
    """Additional metrics of a batch, specific to this estimator."""

    def __call__(self, trajectories: Trajectories, config: AdvantageConfig | None = None) -> Advantages:
        """Compute the advantages of a batch.

        Raises:
            UsageError: ``trajectories`` is empty, or a changed setting is not read by this estimator.
        """
        config = config or AdvantageConfig()
        self._check(config)
        if not trajectories:
            raise UsageError(f"Estimator {self.name} needs at least one trajectory, got none.")
        advantages, returns = self.function(trajectories, config)
        pools = pool_indices(trajectories, config.whiten)
        advantages = whitened(advantages, pools, config, center=not self.centered)
        metrics = _batch_metrics(trajectories, config, advantages)
        if self.extra_metrics is not None:
            metrics |= self.extra_metrics(trajectories)
        return Advantages(advantages, returns, metrics)

    def _check(self, config: AdvantageConfig) -> None:
        reads = {*self.reads, "tolerance"}
        if "whiten" in reads and config.whiten == config.baseline == "none":
            reads.discard("weigh")
        if config.level == "turn" and "level" in reads:
            reads.discard("discount")
        if not config.normalize_std:
            reads.discard("std_correction")
        changed = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) != f.default}
        ignored = sorted(changed - reads)
        if ignored:
            raise UsageError(
                f"Estimator {self.name} does not read {', '.join(ignored)}; with the current settings it "
                f"reads {', '.join(sorted(reads))}. Remove the others, or choose another estimator."
            )


ESTIMATORS: dict[str, Estimator] = {}
"""All registered estimators by name."""


def find_estimator(name: str) -> Estimator:
    """Return the estimator registered under ``name``."""
    if name not in ESTIMATORS:
        raise UnknownName("estimator", name, ESTIMATORS, f"Estimators: {', '.join(ESTIMATORS)}.")
    return ESTIMATORS[name]


def register_estimator(
    *reads: str, centered: bool = False, extra_metrics: MetricsFunction | None = None
) -> Callable[[EstimatorFunction], Estimator]:
    """Register a function as an estimator under its own name.

    Args:
        reads: The settings of `AdvantageConfig` it reads; other changed settings are refused.
        centered: Whether its advantages are relative to a group already.
        extra_metrics: Computes additional metrics of a batch.
    """

    def register(function: EstimatorFunction) -> Estimator:
        name = function.__name__
        ESTIMATORS[name] = Estimator(name, function, reads, centered, extra_metrics)
        return ESTIMATORS[name]

    return register


# --- groups and pools of trajectories


def group_indices(trajectories: Trajectories) -> list[list[int]]:
    """Indices of the trajectories of each group."""
    return _indices_by_key(t.group for t in trajectories)


def pool_indices(trajectories: Trajectories, over: str) -> list[list[int]]:
    """Indices of trajectories that share statistics: none, the whole batch, or one environment's."""
    if over == "none":
        return []
    return _indices_by_key(t.env_id if over == "env" else "" for t in trajectories)


def _indices_by_key(keys: Iterable[str]) -> list[list[int]]:
    members: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    return list(members.values())


# --- statistics


def relative_to_groups(
    scores: FloatArray, groups: Iterable[list[int]], config: AdvantageConfig, divisor: str
) -> FloatArray:
    """Differences from the group's mean; 0 in groups with one member or without variance.

    ``groups`` are indices into ``scores``; ``divisor`` is ``std``, ``one``, or ``others`` for leave-one-out.
    """
    relative = np.zeros(len(scores))
    for members in groups:
        own = scores[members]
        if not _zero_variance(own, config):
            std = corrected_std(float(own.std()), len(own), config)
            scale = {"std": std, "one": 1.0, "others": (len(own) - 1) / len(own)}[divisor]
            relative[members] = (own - own.mean()) / scale
    return relative


def scores_relative_to_groups(
    trajectories: Trajectories, config: AdvantageConfig, divisor: str
) -> FloatArray:
    """Each trajectory's score relative to its group; every trajectory counts once, whatever its length."""
    scores = np.array([t.score for t in trajectories])
    return relative_to_groups(scores, group_indices(trajectories), config, divisor)


def corrected_std(std: float, count: int, config: AdvantageConfig) -> float:
    """Rescale a standard deviation over ``count`` members to divide by ``count - std_correction``."""
    return std * float(np.sqrt(count / (count - config.std_correction)))


def _zero_variance(scores: FloatArray, config: AdvantageConfig) -> bool:
    return len(scores) < 2 or bool(scores.std() <= config.tolerance)


def moments(arrays: Sequence[FloatArray], weigh: str, *, center: bool = True) -> tuple[float, float]:
    """Mean (0 unless ``center``) and standard deviation, counting each trajectory or each token once."""
    weights = np.concatenate(
        [np.full(len(a), 1 / len(a) if weigh == "trajectory" else 1.0) for a in arrays if len(a)]
        or [np.zeros(0)]
    )
    numbers = np.concatenate(arrays)
    if not len(numbers):
        return 0.0, 0.0
    mean = float(np.average(numbers, weights=weights)) if center else 0.0
    return mean, float(np.sqrt(np.average((numbers - mean) ** 2, weights=weights)))


def whitened(
    arrays: Sequence[FloatArray], pools: list[list[int]], config: AdvantageConfig, *, center: bool
) -> list[FloatArray]:
    """Scale each pool to standard deviation 1 and, with ``center``, shift it to mean 0."""
    white = list(arrays)
    for members in pools:
        mean, std = moments([arrays[i] for i in members], config.weigh, center=center)
        for i in members:
            white[i] = (arrays[i] - mean) / std if std > config.tolerance else np.zeros(len(arrays[i]))
    return white


# --- discounting


def played_states(trajectory: Trajectory, estimator: str) -> list[Hashable]:
    """The states before the turns that have action tokens; raises `UsageError` if there are none."""
    if len(trajectory.states) != len(trajectory.tokens):
        raise UsageError(
            f"Estimator {estimator} needs the state before each turn, but {trajectory} has none. Pass states."
        )
    return [trajectory.states[turn] for turn in np.flatnonzero(trajectory.tokens).tolist()]


def discounted_sums(terms: FloatArray, decay: FloatArray, last: float = 0.0) -> FloatArray:
    """``sums[i] = terms[i] + decay[i] * sums[i + 1]``, with ``last`` beyond the end."""
    sums = np.empty(len(terms))
    for i in range(len(terms) - 1, -1, -1):
        last = sums[i] = terms[i] + decay[i] * last
    return sums


def factor_per_token(t: Trajectory, factor: float, unit: str) -> FloatArray:
    """The discount from each token to the next; in units of turns, 1 except at the end of a turn."""
    factors = np.full(int(t.tokens.sum()), factor if unit == "token" else 1.0)
    factors[t.ends] = factor
    return factors


def turn_returns(t: Trajectory, config: AdvantageConfig) -> FloatArray:
    """[played turns] Discounted return from each turn on, without a bootstrap value."""
    return discounted_sums(t.rewards_by_turn(), np.full(len(t.played), config.gamma))


def _batch_metrics(
    trajectories: Trajectories, config: AdvantageConfig, advantages: Sequence[FloatArray]
) -> dict[str, float]:
    """Metrics of every estimator; fractions of groups or of trajectories."""
    scores = np.array([t.score for t in trajectories])
    groups = group_indices(trajectories)
    sizes = np.array([len(members) for members in groups])
    flat = np.array([_zero_variance(scores[members], config) for members in groups])
    mean, std = moments(advantages, "token")
    return {
        "groups": float(len(groups)),
        "singleton_group_frac": float(np.mean(sizes == 1)),
        "zero_std_group_frac": float(np.mean(flat & (sizes > 1))),
        "truncated_frac": float(np.mean([not t.terminated for t in trajectories])),
        "score_mean": float(scores.mean()),
        "advantage_mean": mean,
        "advantage_std": std,
        "advantage_abs_max": max((float(np.abs(a).max()) for a in advantages if len(a)), default=0.0),
    }
