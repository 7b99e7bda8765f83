"""Generalized advantage estimation with a critic (arXiv 1506.02438)."""

from __future__ import annotations

import numpy as np

from rollgym.core.errors import UsageError
from rollgym.trainer.advantages.base import (
    Trajectories,
    discounted_sums,
    factor_per_token,
    register_estimator,
)
from rollgym.trainer.advantages.types import AdvantageConfig, FloatArray, Trajectory


@register_estimator("level", "gamma", "lam", "discount", "whiten", "weigh")
def gae(batch: Trajectories, config: AdvantageConfig) -> tuple[list[FloatArray], list[FloatArray]]:
    """Generalized advantage estimation over turns or over action tokens."""
    estimate = _over_turns if config.level == "turn" else _over_tokens
    pairs = [estimate(t, config) for t in batch]
    return [advantages for advantages, _ in pairs], [returns for _, returns in pairs]


def _over_tokens(t: Trajectory, config: AdvantageConfig) -> tuple[FloatArray, FloatArray]:
    values = _values(t)
    gamma = factor_per_token(t, config.gamma, config.discount)
    lam = factor_per_token(t, config.lam, config.discount)
    advantages = _gae(t.rewards_by_token(), values, t.bootstrap, gamma, lam)
    return advantages, advantages + values


def _over_turns(t: Trajectory, config: AdvantageConfig) -> tuple[FloatArray, FloatArray]:
    values = _values(t)[t.starts]
    gamma, lam = np.full(len(values), config.gamma), np.full(len(values), config.lam)
    advantages = _gae(t.rewards_by_turn(), values, t.bootstrap, gamma, lam)
    return np.repeat(advantages, t.played), np.repeat(advantages + values, t.played)


def _values(t: Trajectory) -> FloatArray:
    if t.values is None:
        raise UsageError(
            f"Estimator gae needs the critic's values, but {t} has none. Pass values, or use reinforce."
        )
    return t.values


def _gae(
    rewards: FloatArray, values: FloatArray, bootstrap: float, gamma: FloatArray, lam: FloatArray
) -> FloatArray:
    next_values = np.append(values, bootstrap)[1:] if len(values) else values
    return discounted_sums(rewards + gamma * next_values - values, gamma * lam)
