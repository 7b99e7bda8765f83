"""Estimators from discounted returns without a group: REINFORCE and REINFORCE++."""

from __future__ import annotations

from rollgym.trainer.advantages.base import (
    Trajectories,
    discounted_sums,
    factor_per_token,
    moments,
    pool_indices,
    register_estimator,
    whitened,
)
from rollgym.trainer.advantages.types import AdvantageConfig, FloatArray, Trajectory


@register_estimator("gamma", "discount", "baseline", "whiten", "weigh")
def reinforce(batch: Trajectories, config: AdvantageConfig) -> tuple[list[FloatArray], None]:
    """REINFORCE: the discounted return from each token on, minus the mean over ``baseline`` if set."""
    returns = [_token_returns(t, config) for t in batch]
    for members in pool_indices(batch, config.baseline):
        mean, _ = moments([returns[i] for i in members], config.weigh)
        for i in members:
            returns[i] = returns[i] - mean
    return returns, None


@register_estimator("gamma", "discount", "weigh")
def reinforce_pp(batch: Trajectories, config: AdvantageConfig) -> tuple[list[FloatArray], None]:
    """REINFORCE++: returns from each token on, whitened over the whole batch."""
    returns = [_token_returns(t, config) for t in batch]
    return whitened(returns, pool_indices(batch, "batch"), config, center=True), None


def _token_returns(t: Trajectory, config: AdvantageConfig) -> FloatArray:
    """[action tokens] Discounted return from each token on."""
    factors = factor_per_token(t, config.gamma, config.discount)
    return discounted_sums(t.rewards_by_token(), factors, t.bootstrap)
