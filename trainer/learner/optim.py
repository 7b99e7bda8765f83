"""AdamW over a policy and its critic, and the learning rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch

from rollgym.trainer.learner.config import LearnerConfig

DIVERGED = (
    "The gradient is not finite: the loss diverged. Lower learner.learning_rate, or check the rewards. "
    "Saved checkpoints are not affected."
)


def lr_scale(config: LearnerConfig, step: int, total: int) -> float:
    """Return the fraction of the learning rate at an optimizer step; ``min_lr_ratio`` at the last one."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    span = max(total - 1 - config.warmup_steps, 1)
    done = min(max((step - config.warmup_steps) / span, 0.0), 1.0)
    if config.schedule == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return 1.0 + (config.min_lr_ratio - 1.0) * done


def make_adamw(
    param_groups: list[dict[str, Any]], config: LearnerConfig, *, fused: bool = False
) -> torch.optim.AdamW:
    """Make the optimizer of `TrainedModules.param_groups`; a fused one needs no memory for a step."""
    return torch.optim.AdamW(
        param_groups,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=fused or None,
    )
