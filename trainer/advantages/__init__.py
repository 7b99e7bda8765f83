"""Advantage estimators: pure functions from trajectories to per-token advantages.

types.py            Trajectory, AdvantageConfig, Advantages
base.py             Estimator, the registry, and statistics that several families share
group_relative.py   grpo, dr_grpo, rloo
reinforce.py        reinforce, reinforce_pp
gae.py              gae
turn_level.py       grpo_turns, gigpo
"""

from rollgym.trainer.advantages import gae, group_relative, reinforce, turn_level  # noqa: F401  (they register)
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
