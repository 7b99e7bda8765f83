"""Estimators that compare single turns within a group: turn-level GRPO and GiGPO."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from rollgym.trainer.advantages.base import (
    Trajectories,
    corrected_std,
    group_indices,
    moments,
    played_states,
    register_estimator,
    relative_to_groups,
    scores_relative_to_groups,
    turn_returns,
)
from rollgym.trainer.advantages.types import AdvantageConfig, FloatArray


@register_estimator("gamma", "normalize_std", "std_correction", "whiten", "weigh", centered=True)
def grpo_turns(batch: Trajectories, config: AdvantageConfig) -> tuple[list[FloatArray], None]:
    """Turn-level GRPO: the return from each turn on, relative to all such returns of the group."""
    returns = [turn_returns(t, config) for t in batch]
    relative = [np.zeros_like(own) for own in returns]
    for members in group_indices(batch):
        mean, std = moments([returns[i] for i in members], "trajectory")
        compared = sum(len(returns[i]) > 0 for i in members)
        if std > config.tolerance and compared > 1:
            scale = corrected_std(std, compared, config) if config.normalize_std else 1.0
            for i in members:
                relative[i] = (returns[i] - mean) / scale
    return [np.repeat(own, t.played) for t, own in zip(batch, relative, strict=True)], None


def _turns_by_state(batch: Trajectories) -> dict[Hashable, list[int]]:
    """Turns with action tokens, numbered through the batch, by group and the state before the turn."""
    turns: dict[Hashable, list[int]] = {}
    number = 0
    for t in batch:
        for state in played_states(t, "gigpo"):
            turns.setdefault((t.group, state), []).append(number)
            number += 1
    return turns


def _shared_state_metrics(batch: Trajectories) -> dict[str, float]:
    """How many states several turns share; without shared states ``gigpo`` equals ``grpo``."""
    sizes = np.array([len(turns) for turns in _turns_by_state(batch).values()])
    shared = sizes > 1
    turns = float(sizes.sum())
    return {
        "shared_state_frac": float(sizes[shared].sum()) / turns if turns else 0.0,
        "shared_states": float(shared.sum()),
        "turns_per_shared_state": float(sizes[shared].mean()) if shared.any() else 0.0,
    }


@register_estimator(
    "gamma",
    "step_weight",
    "normalize_std",
    "std_correction",
    "whiten",
    "weigh",
    centered=True,
    extra_metrics=_shared_state_metrics,
)
def gigpo(batch: Trajectories, config: AdvantageConfig) -> tuple[list[FloatArray], None]:
    """GiGPO (arXiv 2505.10978): GRPO's advantage plus one among turns of the group with equal states."""
    states = _turns_by_state(batch)
    divisor = "std" if config.normalize_std else "one"
    steps = [step for t in batch for step in turn_returns(t, config)]
    episodes = scores_relative_to_groups(batch, config, divisor)
    own = config.step_weight * relative_to_groups(np.array(steps), states.values(), config, divisor)
    parts = np.split(own, np.cumsum([len(t.played) for t in batch])[:-1])
    return [np.repeat(a + b, t.played) for t, a, b in zip(batch, episodes, parts, strict=True)], None
