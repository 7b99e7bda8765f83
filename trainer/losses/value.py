"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rollgym.core.errors import UsageError
from rollgym.trainer.losses.metrics import LossResult, mean_of, sum_of


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float | None = None
) -> LossResult:
    """Half the squared error of the value head, clipped as in PPO if ``clip`` is given.

    Args:
        values: [N] Current values, with gradient.
        old_values: [N] Values at the start of the update.
        returns: [N] Regression targets.
        weights: [N] Weights from `token_weights`; 0 masks a token.
        clip: Take the larger of the error and the error with the new value held within ``clip`` of the old.
    """
    if clip is not None and not clip > 0:
        raise UsageError(f"value_clip must be above 0 or null (no clipping), not {clip}.")
    if not values.shape == old_values.shape == returns.shape == weights.shape:
        raise ValueError("values, old_values, returns and weights must have the same shape, [N]")
    mask = weights != 0
    values, returns = torch.where(mask, values, 0.0), torch.where(mask, returns.detach(), 0.0)
    error = values - returns
    squared = error.square()
    metrics = {}
    if clip is not None:
        old = torch.where(mask, old_values.detach(), 0.0)
        bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
        metrics["value_clipped"] = mean_of(bounded > squared, mask)
        squared = torch.maximum(squared, bounded)
    term = weights * squared / 2
    metrics |= {"value_loss": sum_of(term), "return": mean_of(returns, mask)}
    metrics |= {"return_squared": mean_of(returns**2, mask), "value_error": mean_of(error, mask)}
    metrics["value_error_squared"] = mean_of(error**2, mask)
    return LossResult(term.sum(), metrics)
