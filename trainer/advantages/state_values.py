"""Estimators with a value for each state, computed from the batch instead of by a critic."""

from __future__ import annotations

import numpy as np

from rollgym.trainer.advantages.base import Trajectories, discounted_sums, played_states, register_estimator
from rollgym.trainer.advantages.types import AdvantageConfig, FloatArray, IntArray

_SWEEPS = 1_000
"""Upper limit of the sweeps over all turns; a discount below 1 converges long before."""
_CONVERGED = 1e-9


def _state_ids(batch: Trajectories) -> list[IntArray]:
    """For each trajectory the numbers of the states before its played turns.

    A state is an environment, a role and a key, whatever the group.
    """
    numbers: dict[object, int] = {}
    ids = []
    for t in batch:
        keys = ((t.env_id, t.role, state) for state in played_states(t, "gae_states"))
        ids.append(np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64))
    return ids


def _prior_means(batch: Trajectories, ids: list[IntArray], config: AdvantageConfig) -> FloatArray:
    """[states] The mean return of all turns in the state's environment."""
    totals: dict[str, list[float]] = {}
    owner: dict[int, str] = {}
    for t, own in zip(batch, ids, strict=True):
        returns = discounted_sums(t.rewards_by_turn(), np.full(len(own), config.gamma), t.bootstrap)
        totals.setdefault(t.env_id, []).extend(returns.tolist())
        owner.update(dict.fromkeys(own.tolist(), t.env_id))
    means = {env_id: float(np.mean(returns)) for env_id, returns in totals.items() if returns}
    return np.array([means[owner[state]] for state in range(len(owner))])


def _state_values(batch: Trajectories, ids: list[IntArray], config: AdvantageConfig) -> FloatArray:
    """[states] Fixed point of ``V = (sum of r + gamma * V' over its turns + n0 * prior) / (turns + n0)``."""
    prior = _prior_means(batch, ids, config)
    states = np.concatenate(ids)
    rewards = np.concatenate([t.rewards_by_turn() for t in batch])
    bootstraps = np.zeros(len(states))
    following = np.full(len(states), len(prior))
    start = 0
    for t, own in zip(batch, ids, strict=True):
        if len(own):
            following[start : start + len(own) - 1] = own[1:]
            bootstraps[start + len(own) - 1] = t.bootstrap
        start += len(own)
    visits = np.bincount(states, minlength=len(prior)) + config.state_prior
    values = prior.copy()
    for _ in range(_SWEEPS):
        after = np.append(values, 0.0)[following] + bootstraps
        sums = np.bincount(states, weights=rewards + config.gamma * after, minlength=len(prior))
        updated = (sums + config.state_prior * prior) / visits
        change = float(np.abs(updated - values).max(initial=0.0))
        values = updated
        if change <= _CONVERGED:
            break
    return values


def _state_metrics(batch: Trajectories) -> dict[str, float]:
    """How many turns share a state with another turn of the batch."""
    visits = np.bincount(np.concatenate(_state_ids(batch)))
    turns = float(visits.sum())
    return {
        "shared_state_frac": float(visits[visits > 1].sum()) / turns if turns else 0.0,
        "turns_per_state": turns / len(visits) if turns else 0.0,
    }


@register_estimator("gamma", "lam", "state_prior", "whiten", "weigh", extra_metrics=_state_metrics)
def gae_states(batch: Trajectories, config: AdvantageConfig) -> tuple[list[FloatArray], None]:
    """GAE over turns, with values of states estimated from all turns of the batch that began in them."""
    ids = _state_ids(batch)
    values = _state_values(batch, ids, config)
    advantages = []
    for t, own in zip(batch, ids, strict=True):
        before = values[own]
        after = np.append(before, t.bootstrap)[1:] if len(own) else before
        deltas = t.rewards_by_turn() + config.gamma * after - before
        per_turn = discounted_sums(deltas, np.full(len(own), config.gamma * config.lam))
        advantages.append(np.repeat(per_turn, t.played))
    return advantages, None
