"""Advantage estimators: pure functions from trajectories to per-token advantages.

types.py            Trajectory, AdvantageConfig, Advantages
base.py             Estimator, the registry, and statistics that several families share
group_relative.py   grpo, dr_grpo, rloo
reinforce.py        reinforce, reinforce_pp
gae.py              gae
turn_level.py       grpo_turns, gigpo
state_values.py     gae_states
"""

from rollgym.trainer.advantages import (  # noqa: F401  (they register)
    gae,
    group_relative,
    reinforce,
    state_values,
    turn_level,
)
from rollgym.trainer.advantages.base import ESTIMATORS, Estimator, find_estimator, register_estimator
from rollgym.trainer.advantages.types import AdvantageConfig, Advantages, FloatArray, Trajectory

__all__ = [
    "ESTIMATORS",
    "AdvantageConfig",
    "Advantages",
    "Estimator",
    "FloatArray",
    "Trajectory",
    "find_estimator",
    "register_estimator",
]
