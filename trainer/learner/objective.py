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

GAPS = ("logprob_gap", "logprob_gap_max", "logprob_gap_stale")
"""Metrics that compare the engine's log-probs with the learner's."""


GAP_LIMIT = {"float32": 0.2, "bfloat16": 0.5}
"""Mean ``logprob_gap`` above which engine and learner compute different models; rounding is far below it."""


def wrong_model(name: str, gap: float, limit: float) -> str:
    """What ends a run whose engine samples from another distribution than the learner trains."""
    return (
        f"The engine's log-probs of {name} differ from the learner's by {gap:.2g} nats on average for tokens "
        f"that the current weights sampled (at most {limit:g} can be rounding): one of the two computes "
        "another model. Nothing was learnt from them. Try learner.layout=padded or another engine.kind, and "
        "see docs/model_families.md."
    )


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
    chosen = [row for row in rows if np.any(advantages[starts[row] : starts[row + 1]])] or rows[:1]
    if loss.ratio_level == "episode":  # the ratio is over all rows of an episode
        episodes = set(batch.owner[chosen].tolist())
        return [row for row in rows if int(batch.owner[row]) in episodes]
    return chosen


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
    shared = np.arange(len(part))
    if loss.ratio_level == "episode":
        shared = np.unique(batch.owner[list(part)], return_inverse=True)[1]
    numbers = np.repeat(shared, [len(batch.rows[row].places) for row in part])
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
    for name in GAPS:  # `policy_loss` compares with "old"; what the engine is compared with is this policy
        metrics.pop(name, None)
    gap = (scores.logprobs.detach() - arrays["behaviour"]).abs()
    metrics |= _gap_metrics(gap, weight != 0, arrays.get("staleness"))
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
    """How far the engine's log-probs are from this policy's: of all rows, or of those of the first step.

    ``logprob_gap`` is over tokens that the current weights sampled: engine against learner, nothing else.
    ``logprob_gap_stale`` is over tokens of older weights, which differ because the policy has moved.
    """
    old, behaviour = batch.arrays["old"], batch.arrays["behaviour"]
    if old is behaviour:  # the engine's word was taken; the first step began with the policy that played
        return {name: first[name] for name in GAPS if name in first}
    gap = torch.from_numpy(np.abs(old - behaviour))
    stale = batch.arrays.get("staleness")
    every = torch.ones_like(gap, dtype=torch.bool)
    found = _gap_metrics(gap, every, None if stale is None else torch.from_numpy(stale))
    return {name: metric.value for name, metric in found.items()}


def _gap_metrics(gap: Tensor, mask: Tensor, staleness: Tensor | None) -> dict[str, Metric]:
    """The gap over tokens of the current version and, apart, over older ones; only where there are any."""
    fresh = mask if staleness is None else mask & (staleness == 0)
    found = {"logprob_gap": mean_of(gap, fresh), "logprob_gap_max": max_of(gap, fresh)}
    if staleness is None:
        return found
    stale = mask & (staleness != 0)
    found = found if fresh.any() else {}
    return found | ({"logprob_gap_stale": mean_of(gap, stale)} if stale.any() else {})


def _tensor(values: FloatArray, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, torch.float32)
