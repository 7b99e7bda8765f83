"""Estimators that compare whole episodes of one group: GRPO, Dr. GRPO and RLOO."""

from __future__ import annotations

import numpy as np

from rollgym.trainer.advantages.base import Trajectories, register_estimator, scores_relative_to_groups
from rollgym.trainer.advantages.types import AdvantageConfig, FloatArray


@register_estimator("whiten", "weigh", "std_correction", centered=True)
def grpo(batch: Trajectories, config: AdvantageConfig) -> tuple[list[FloatArray], None]:
    """GRPO: score minus the group's mean, divided by the group's standard deviation."""
    return _on_all_tokens(batch, scores_relative_to_groups(batch, config, "std")), None


@register_estimator("whiten", "weigh", centered=True)
def dr_grpo(batch: Trajectories, config: AdvantageConfig) -> tuple[list[FloatArray], None]:
    """Dr. GRPO: score minus the group's mean."""
    return _on_all_tokens(batch, scores_relative_to_groups(batch, config, "one")), None


@register_estimator("whiten", "weigh", centered=True)
def rloo(batch: Trajectories, config: AdvantageConfig) -> tuple[list[FloatArray], None]:
    """RLOO: score minus the mean of the other members of the group."""
    return _on_all_tokens(batch, scores_relative_to_groups(batch, config, "others")), None


def _on_all_tokens(batch: Trajectories, scores: FloatArray) -> list[FloatArray]:
    """Each episode's number on all of its action tokens."""
    return [np.full(int(t.tokens.sum()), score) for t, score in zip(batch, scores, strict=True)]
