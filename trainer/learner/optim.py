"""AdamW over a policy and its critic: the learning rate schedule, clipping, and an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollgym.core.errors import RunError
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


def make_adamw(param_groups: list[dict[str, Any]], config: LearnerConfig) -> torch.optim.AdamW:
    """Make the optimizer of `TrainedModules.param_groups`."""
    return torch.optim.AdamW(
        param_groups, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )


def clip_and_step(
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None,
    lr_scale: float,
    joint_norm: bool,
    clip: Callable[[list[Any], float], Tensor] = torch.nn.utils.clip_grad_norm_,
) -> float:
    """Clip the gradients and take a step; returns the policy's gradient norm before clipping.

    Args:
        optimizer: Its parameter groups have a ``base`` learning rate.
        max_norm: Maximum gradient norm; ``None``: no clipping.
        lr_scale: Fraction of the base learning rate for this step.
        joint_norm: Clip the norm over all groups, instead of one norm per group.
        clip: Clips the gradients of parameters to a norm, and returns the norm before.

    Raises:
        RunError: A gradient is not finite.
    """
    sets = [group["params"] for group in optimizer.param_groups]
    if joint_norm:
        sets = [sum(sets, [])]
    norms = [clip(parameters, max_norm or float("inf")) for parameters in sets]
    if not all(map(torch.isfinite, norms)):
        raise RunError(DIVERGED)
    for group in optimizer.param_groups:
        group["lr"] = group["base"] * lr_scale
    optimizer.step()
    return float(norms[0])
