"""What a learner loses on a micro-batch, and which rows and weights go into it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollgym.trainer.batch import Batch
from rollgym.trainer.learner import Metrics
from rollgym.trainer.learner.settings import LearnerSettings
from rollgym.trainer.loss_metrics import Metric, max_of, mean_of
from rollgym.trainer.losses import LossSettings, Tokens, policy_loss, value_loss
from rollgym.trainer.rows import FloatArray
from rollgym.trainer.scoring import Scores
from rollgym.trainer.weighting import Mode, token_weights


def batch_weights(batch: Batch, episodes: Sequence[int], mode: Mode, constant: float | None) -> FloatArray:
    """What each token weighs in an optimiser step on these episodes."""
    every = batch.lengths
    lengths = [every[number] for number in episodes]
    weights = np.zeros(batch.tokens)
    weights[batch.flat(batch.rows_of(episodes))] = np.concatenate(
        token_weights(lengths, mode, constant=constant)
    )
    return weights


def teaching(batch: Batch, rows: list[int], loss: LossSettings) -> list[int]:
    """The rows whose gradient is not zero by itself; the others still count in every denominator."""
    if loss.entropy_coef or (loss.kl_coef and loss.kl_in == "loss") or "returns" in batch.arrays:
        return rows
    advantages, starts = batch.arrays["advantages"], batch.starts
    return [row for row in rows if np.any(advantages[starts[row] : starts[row + 1]])] or rows[:1]


def shortest(batch: Batch) -> list[int]:
    """The row that costs least."""
    return [min(range(len(batch.rows)), key=lambda row: len(batch.rows[row].inputs))]


def losses_of(
    batch: Batch,
    part: Sequence[int],
    weights: FloatArray,
    scores: Scores,
    values: Tensor | None,
    loss: LossSettings,
    settings: LearnerSettings,
) -> tuple[list[Tensor], dict[str, Metric]]:
    """The policy's loss on some rows of a batch and, where there are values, the critic's; with metrics."""
    device, at = scores.logprobs.device, batch.flat(part)
    arrays = {name: _tensor(found[at], device) for name, found in batch.arrays.items()}
    numbers = np.repeat(np.arange(len(part)), [len(batch.rows[row].places) for row in part])
    weight = _tensor(weights[at], device)
    result = policy_loss(
        Tokens(
            logprobs=scores.logprobs,
            old=arrays["old"],
            behaviour=arrays["behaviour"],
            advantages=arrays["advantages"],
            weights=weight,
            rows=torch.from_numpy(numbers).to(device),
            entropy=scores.entropy,
            reference=arrays.get("reference"),
        ),
        loss,
    )
    losses, metrics = [result.loss], dict(result.metrics)
    gap = (scores.logprobs.detach() - arrays["behaviour"]).abs()
    metrics |= {"logprob_gap": mean_of(gap, weight != 0), "logprob_gap_max": max_of(gap, weight != 0)}
    if values is not None:
        more, told = critic_loss(batch, part, weights, values, settings)
        losses += more
        metrics |= told
    return losses, metrics


def critic_loss(
    batch: Batch, part: Sequence[int], weights: FloatArray, values: Tensor, settings: LearnerSettings
) -> tuple[list[Tensor], dict[str, Metric]]:
    """The critic's loss on some rows of a batch, with metrics."""
    at = batch.flat(part)
    old, returns = (_tensor(batch.arrays[name][at], values.device) for name in ("values", "returns"))
    worth = value_loss(values, old, returns, _tensor(weights[at], values.device), settings.value_clip)
    return [settings.value_coef * worth.loss], dict(worth.metrics)


def engine_gap(batch: Batch, first: Metrics) -> Metrics:
    """How far the engine's log-probs are from this policy's: of all rows, or of those of the first step."""
    old, behaviour = batch.arrays["old"], batch.arrays["behaviour"]
    if old is behaviour:  # the engine's word was taken; the first step began with the policy that played
        return {name: first.get(name, 0.0) for name in ("logprob_gap", "logprob_gap_max")}
    gap = np.abs(old - behaviour)
    return {"logprob_gap": float(gap.mean()), "logprob_gap_max": float(gap.max())}


def _tensor(values: FloatArray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, torch.float32)
