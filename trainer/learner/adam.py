"""One AdamW over all parameters: what the local learner, DDP and FSDP2 have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollgym.errors import RunError
from rollgym.trainer.learner.base import BaseLearner

DIVERGED = (
    "The gradient is not finite: the loss diverged. Lower learner.learning_rate, or look at the rewards. "
    "Nothing that was saved is affected."
)


def make_groups(learner: BaseLearner) -> list[dict[str, Any]]:
    """Parameter groups: the policy's, then the critic's; each knows the rate that schedules scale."""
    settings = learner.settings
    rate = settings.learning_rate
    of_critic = rate if settings.critic_rate is None else settings.critic_rate
    trained = [parameter for parameter in learner.model.parameters() if parameter.requires_grad]
    groups = [{"params": trained, "base": of_critic if learner.judges else rate}]
    if learner.critic is not None:
        groups.append({"params": list(learner.critic.parameters()), "base": of_critic})
    return [{**group, "lr": group["base"]} for group in groups]


def make_adam(learner: BaseLearner) -> torch.optim.AdamW:
    """The optimiser of what a learner trains."""
    settings = learner.settings
    return torch.optim.AdamW(
        make_groups(learner), betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )


def clipped_step(
    optimiser: torch.optim.Optimizer,
    *,
    bound: float | None,
    share: float,
    together: bool,
    clip: Callable[[list[Any], float], Tensor] = torch.nn.utils.clip_grad_norm_,
) -> float:
    """Hold the gradients to their bound and take a step; returns the policy's norm before.

    Args:
        optimiser: Of parameter groups that know their ``base`` rate.
        bound: The greatest norm of a gradient.
        share: Of the base rate that is due now.
        together: Whether all groups have one norm, or each its own.
        clip: Holds a gradient to its bound and returns its norm.
    """
    sets = [group["params"] for group in optimiser.param_groups]
    if together:
        sets = [sum(sets, [])]
    norms = [clip(parameters, bound or float("inf")) for parameters in sets]
    if not all(map(torch.isfinite, norms)):
        raise RunError(DIVERGED)
    for group in optimiser.param_groups:
        group["lr"] = group["base"] * share
    optimiser.step()
    return float(norms[0])
