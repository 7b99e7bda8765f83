"""The loss of a micro-batch: which rows have a gradient, token weights, policy and value loss, metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollgym.trainer.data.batch import Batch
from rollgym.trainer.data.sequences import FloatArray
from rollgym.trainer.learner.config import LearnerConfig
from rollgym.trainer.learner.protocol import Metrics
from rollgym.trainer.losses.aggregation import token_divisors
from rollgym.trainer.losses.metrics import Metric, max_of, mean_of
from rollgym.trainer.losses.policy import Tokens, policy_loss
from rollgym.trainer.losses.preference import preference_loss
from rollgym.trainer.losses.preference_settings import PreferenceLoss
from rollgym.trainer.losses.settings import LossConfig
from rollgym.trainer.losses.value import value_loss

GAPS = ("train_rollout_logprob_diff", "train_rollout_logprob_diff_max", "stale_logprob_diff")
"""Metrics that compare the engine's log-probs with the learner's."""
GAP_LIMIT = {"float32": 0.2, "bfloat16": 0.5}
"""Mean ``train_rollout_logprob_diff`` above which engine and learner compute different models."""


def batch_weights(
    batch: Batch, episodes: Sequence[int], loss: LossConfig, rows: Sequence[int] | None = None
) -> FloatArray:
    """Return the weight of each token in an optimizer step on these episodes; ``rows``: only of these rows.

    Tokens that ``trained`` leaves out have weight 0 and are in no denominator.
    """
    counts = np.zeros(len(batch.final_lengths), dtype=np.int64)
    np.add.at(counts, batch.episode_of, batch.trained_tokens)
    divisors = token_divisors(counts[list(episodes)].tolist(), loss.aggregation, loss.aggregation_constant)
    divisor_of = dict(zip(episodes, divisors, strict=True))
    weights = np.zeros(batch.num_tokens)
    trained = batch.arrays.get("trained")
    for row in batch.sequences_of(episodes) if rows is None else rows:
        start, end = batch.starts[row], batch.starts[row + 1]
        divisor = divisor_of[int(batch.episode_of[row])]
        if divisor:
            kept = np.ones(end - start) if trained is None else trained[start:end] != 0
            weights[start:end] = kept / divisor
    return weights


def rows_with_gradient(batch: Batch, rows: list[int], loss: LossConfig) -> list[int]:
    """Return the rows whose gradient is not zero; the others still count in every denominator."""
    if loss.entropy_coef or (loss.kl_coef and loss.kl_in == "loss") or "returns" in batch.arrays:
        return rows
    flags = batch.rows_with_advantages
    chosen = [row for row in rows if flags[row]] or rows[:1]
    if loss.ratio_level == "episode":  # the ratio is over all rows of an episode
        episodes = set(batch.episode_of[chosen].tolist())
        return [row for row in rows if int(batch.episode_of[row]) in episodes]
    return chosen


def shortest_row(batch: Batch) -> list[int]:
    """Return the cheapest row, for ranks that only keep collectives matching."""
    return [int(batch.index.lengths.argmin())]


def micro_batch_loss(
    batch: Batch,
    part: Sequence[int],
    weights: FloatArray,
    logprobs: Tensor,
    entropy: Tensor,
    values: Tensor | None,
    loss: LossConfig,
    config: LearnerConfig,
) -> tuple[list[Tensor], dict[str, Metric]]:
    """Compute the policy's loss on rows of a batch and, with values, the critic's; returns metrics too.

    ``weights`` are over all tokens of the batch; log-probs, entropy and values over those of the rows, with
    gradients.
    """
    device, at = logprobs.device, batch.token_indices(part)
    arrays = {name: _tensor(array[at], device) for name, array in batch.arrays.items()}
    shared = np.arange(len(part))
    if loss.ratio_level == "episode":
        shared = np.unique(batch.episode_of[list(part)], return_inverse=True)[1]
    numbers = np.repeat(shared, [len(batch.sequences[row].action_positions) for row in part])
    weight = _tensor(weights[at], device)
    tokens = Tokens(
        logprobs=logprobs,
        old=arrays["old"],
        behavior=arrays["behavior"],
        advantages=arrays["advantages"],
        weights=weight,
        sequence_ids=torch.from_numpy(numbers).to(device),
        entropy=entropy,
        reference=arrays.get("reference"),
    )
    if isinstance(loss, PreferenceLoss):
        result = preference_loss(tokens, loss.settings)
        return [result.loss], result.metrics
    result = policy_loss(tokens, loss)
    losses, metrics = [result.loss], dict(result.metrics)
    for name in GAPS:  # `policy_loss` compares with "old"; the engine is compared with this policy
        metrics.pop(name, None)
    gap = (logprobs.detach() - arrays["behavior"]).abs()
    metrics |= _gap_metrics(gap, weight != 0, arrays.get("staleness"))
    if values is not None:
        value_losses, value_metrics = critic_loss(batch, part, weights, values, config)
        losses += value_losses
        metrics |= value_metrics
    return losses, metrics


def critic_loss(
    batch: Batch, part: Sequence[int], weights: FloatArray, values: Tensor, config: LearnerConfig
) -> tuple[list[Tensor], dict[str, Metric]]:
    """Compute the critic's loss on rows of a batch, with metrics."""
    at = batch.token_indices(part)
    old, returns = (_tensor(batch.arrays[name][at], values.device) for name in ("values", "returns"))
    result = value_loss(values, old, returns, _tensor(weights[at], values.device), config.value_clip)
    return [config.value_coef * result.loss], dict(result.metrics)


def engine_gap(batch: Batch, rows: Sequence[int]) -> dict[str, Metric]:
    """Measure the engine's log-probs of some rows against recomputed ones.

    ``train_rollout_logprob_diff`` is over tokens that the current weights sampled.
    ``stale_logprob_diff`` is over tokens of older weights, which differ because the policy has moved.
    """
    at = batch.token_indices(rows)
    gap = torch.from_numpy(np.abs(batch.arrays["old"][at] - batch.arrays["behavior"][at]))
    stale = batch.arrays.get("staleness")
    every = torch.ones_like(gap, dtype=torch.bool)
    return _gap_metrics(gap, every, None if stale is None else torch.from_numpy(stale[at]))


def first_gap(first: Metrics) -> Metrics:
    """Return the same measures from the metrics of an update's first step, which began with these weights."""
    return {name: first[name] for name in GAPS if name in first}


def _gap_metrics(gap: Tensor, mask: Tensor, staleness: Tensor | None) -> dict[str, Metric]:
    """Return the gap over tokens of the current version and, separately, over older ones, if any."""
    fresh = mask if staleness is None else mask & (staleness == 0)
    metrics = {
        "train_rollout_logprob_diff": mean_of(gap, fresh),
        "train_rollout_logprob_diff_max": max_of(gap, fresh),
    }
    if staleness is None:
        return metrics
    stale = mask & (staleness != 0)
    metrics = metrics if fresh.any() else {}
    return metrics | ({"stale_logprob_diff": mean_of(gap, stale)} if stale.any() else {})


def _tensor(values: FloatArray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, torch.float32)
