"""Policy losses: pure functions of the action tokens of one micro-batch.

Every loss is the sum of weight times per-token loss, with weights computed over the whole batch
(`rollgym.trainer.losses.aggregation`), so the losses of micro-batches add up. A micro-batch holds whole
sequences.

A token of weight 0 is masked: whatever its values are, even NaN, it has log-prob 0 and ratio 1, and is in no
loss, gradient or metric.

Three policies: *behavior* sampled the tokens (the engine's log-probs), *proximal* is the learner's policy at
the start of the update (``old``), *current* is the policy being trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rollgym.core.errors import UsageError
from rollgym.trainer.losses.kl import LOG_RATIO_LIMIT, bounded_exp, kl_per_token
from rollgym.trainer.losses.metrics import LossResult, Metric, max_of, mean_of, sum_of
from rollgym.trainer.losses.settings import LOSS_SPECS, LossConfig, LossSpec

__all__ = [
    "LOSS_SPECS",
    "POLICY_LOSSES",
    "LossConfig",
    "PerToken",
    "Tokens",
    "policy_loss",
    "register_loss",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The action tokens of whole sequences, as flat ``[N]`` tensors."""

    logprobs: Tensor
    """Log-probs of the current policy, with gradient."""
    old: Tensor
    """Log-probs of the proximal policy: the learner's, before the first step of the update."""
    behavior: Tensor
    """Log-probs the engine reported for the distribution it sampled from."""
    advantages: Tensor
    weights: Tensor
    """Weights from `rollgym.trainer.losses.aggregation`; 0 masks a token."""
    sequence_ids: Tensor
    """int64, 0 to S-1: tokens with the same id share a ratio; by ``ratio_level`` a sequence or an episode."""
    entropy: Tensor | None = None
    """Entropy of the current policy's distribution at each token, with gradient."""
    reference: Tensor | None = None
    """Log-probs of the reference policy."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            # [N] with [N, 1] would silently broadcast to [N, N].
            if value.shape != self.logprobs.shape or value.dim() != 1:
                raise ValueError(f"{field.name} has shape {tuple(value.shape)}; expected a flat [N]")
            # An "old" that the caller forgot to detach would move with the current policy: no clipping.
            if value.requires_grad and field.name not in ("logprobs", "entropy"):
                raise ValueError(f"{field.name} must not require a gradient: compute it before the update")

    @property
    def mask(self) -> Tensor:
        """True where a token counts."""
        return self.weights != 0

    def masked(self) -> Tokens:
        """A copy with zeros wherever the weight is 0."""
        mask = self.mask
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: torch.where(mask, v, 0) for k, v in values.items() if v is not None})


PerToken = tuple[Tensor, dict[str, Tensor]]
"""The loss of each token, and values to log as means over tokens."""
LossFunction = Callable[[Tokens, LossConfig], PerToken]


def policy_loss(tokens: Tokens, config: LossConfig) -> LossResult:
    """Compute the loss that ``config`` selects, with its entropy bonus and KL term."""
    tokens = tokens.masked()
    per_token, means = POLICY_LOSSES[config.name](tokens, config)
    terms = {"policy_loss": tokens.weights * per_token} | _extra_terms(tokens, config)
    metrics = {name: sum_of(term) for name, term in terms.items()} | _common_metrics(tokens)
    metrics |= {name: mean_of(values, tokens.mask) for name, values in means.items()}
    if "ratio" in means:
        metrics["ratio_max"] = max_of(means["ratio"], tokens.mask)
    return LossResult(sum((term.sum() for term in terms.values()), tokens.weights.new_zeros(())), metrics)


def _extra_terms(tokens: Tokens, config: LossConfig) -> dict[str, Tensor]:
    terms = {}
    if config.entropy_coef:
        if tokens.entropy is None:
            raise UsageError("entropy_coef > 0 needs Tokens.entropy, which is None.")
        terms["entropy_loss"] = -config.entropy_coef * tokens.weights * tokens.entropy
    if config.kl_coef and config.kl_in == "loss":
        if tokens.reference is None:
            raise UsageError("kl_coef > 0 needs Tokens.reference, which is None.")
        kl = kl_per_token(tokens.logprobs, tokens.reference, config.estimator)
        terms["kl_loss"] = config.kl_coef * tokens.weights * kl
    return terms


def _common_metrics(tokens: Tokens) -> dict[str, Metric]:
    """Metrics of every loss. KLs use k3, the estimator with the least variance as a number."""
    diff, mask = (tokens.old - tokens.behavior).abs(), tokens.mask
    metrics = {
        "train_rollout_logprob_diff": mean_of(diff, mask),
        "train_rollout_logprob_diff_max": max_of(diff, mask),
        "approx_kl": mean_of(kl_per_token(tokens.old, tokens.logprobs, "k3"), mask),
    }
    if tokens.entropy is not None:
        metrics["entropy"] = mean_of(tokens.entropy, mask)
    if tokens.reference is not None:
        metrics["reference_kl"] = mean_of(kl_per_token(tokens.logprobs, tokens.reference, "k3"), mask)
    return metrics


def _importance(tokens: Tokens, config: LossConfig) -> PerToken:
    """Truncated importance weights, proximal over behavior, 0 for rejected tokens. They carry no gradient."""
    if not config.decoupled or (config.tis_cap is None and not config.rejects):
        return torch.ones_like(tokens.weights), {}
    log_ratio = tokens.old - tokens.behavior
    full = bounded_exp(log_ratio)
    kept, log = _rejection(tokens, log_ratio, config)
    if config.tis_cap is None:
        return kept.to(tokens.weights), log
    weight = torch.where(kept, full.clamp(max=config.tis_cap), 0.0)
    log |= {
        "importance": weight,
        "importance_squared": weight**2,
        "tis_clip_frac": kept & (full > config.tis_cap),
    }
    return weight, log


def _rejection(tokens: Tokens, log_ratio: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Which tokens are kept by ``reject_tokens`` and ``reject_sequences``, and the shares rejected.

    A rejected token stays in every denominator, so that it makes no other token count more.
    """
    kept, log = torch.ones_like(tokens.mask), {}
    if config.reject_tokens is not None:
        kept = _within(bounded_exp(log_ratio), config.reject_tokens)
        log["rejected_tokens"] = ~kept
    if config.reject_sequences is not None:
        lengths = _sequence_sums(tokens.mask.to(tokens.weights), tokens.sequence_ids).clamp(min=1)
        mean = _sequence_sums(log_ratio, tokens.sequence_ids) / lengths
        inside = _within(bounded_exp(mean), config.reject_sequences)
        log["rejected_sequences"] = ~inside
        kept = kept & inside
    return kept, log


def _within(ratio: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (ratio >= bounds[0]) & (ratio <= bounds[1])


def _log_ratio(tokens: Tokens, config: LossConfig) -> Tensor:
    return tokens.logprobs - (tokens.old if config.decoupled else tokens.behavior)


def _ratio_log(ratio: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    return {"ratio": ratio, "ratio_cut_off": log_ratio > LOG_RATIO_LIMIT}


def _sequence_sums(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """For each token, the sum over its sequence."""
    count = int(sequence_ids.max()) + 1 if len(sequence_ids) else 0
    return values.new_zeros(count).index_add(0, sequence_ids, values)[sequence_ids]


def _clipped(tokens: Tokens, log_ratio: Tensor, config: LossConfig) -> PerToken:
    """PPO's clipped surrogate for token-level and sequence-level ratios."""
    (low, high), advantages, ratio = config.clip, tokens.advantages, bounded_exp(log_ratio)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    weight, log = _importance(tokens, config)
    log |= _ratio_log(ratio, log_ratio)
    log["clipped_low"] = (ratio < 1 - low) & (advantages < 0)
    log["clipped_high"] = (ratio > 1 + high) & (advantages > 0)
    if config.dual_clip is not None:
        floor = torch.where(advantages < 0, config.dual_clip * advantages, -torch.inf)
        log["clipped_dual"] = gain < floor
        gain = torch.maximum(gain, floor)
    return -weight * gain, log


def _token_clip(tokens: Tokens, config: LossConfig) -> PerToken:
    """PPO (arXiv 1707.06347), with dual clip (1912.09729), decoupled (2505.24298). GRPO's is the same."""
    return _clipped(tokens, _log_ratio(tokens, config), config)


def _gspo(tokens: Tokens, config: LossConfig) -> PerToken:
    """GSPO (arXiv 2507.18071) in token form: a sequence's mean log-ratio, with each token's gradient."""
    lengths = _sequence_sums(tokens.mask.to(tokens.weights), tokens.sequence_ids).clamp(min=1)
    mean = _sequence_sums(_log_ratio(tokens, config).detach(), tokens.sequence_ids) / lengths
    return _clipped(tokens, mean + tokens.logprobs - tokens.logprobs.detach(), config)


def _cispo(tokens: Tokens, config: LossConfig) -> PerToken:
    """CISPO (arXiv 2506.13585): the ratio is a clipped weight without gradient; no token is dropped."""
    low, high = config.clip
    log_ratio = _log_ratio(tokens, config).detach()
    ratio = bounded_exp(log_ratio)
    weight, log = _importance(tokens, config)
    log |= _ratio_log(ratio, log_ratio) | {"clipped_low": ratio < 1 - low, "clipped_high": ratio > 1 + high}
    return -weight * ratio.clamp(1 - low, 1 + high) * tokens.advantages * tokens.logprobs, log


def _topr(tokens: Tokens, config: LossConfig) -> PerToken:
    """TOPR (arXiv 2503.14286): sequence-level ratio to the behavior policy, clipped by the sign."""
    log_ratio = _sequence_sums((tokens.logprobs - tokens.behavior).detach(), tokens.sequence_ids)
    ratio, good = bounded_exp(log_ratio), tokens.advantages >= 0
    taper = torch.where(good, ratio.clamp(*config.topr_positive), ratio.clamp(*config.topr_negative))
    log = _ratio_log(ratio, log_ratio) | {"taper": taper}
    return -taper * tokens.advantages * tokens.logprobs, log


def _reinforce(tokens: Tokens, config: LossConfig) -> PerToken:
    """REINFORCE, with importance weights if ``tis_cap`` is set."""
    weight, log = _importance(tokens, config)
    return -weight * tokens.advantages * tokens.logprobs, log


POLICY_LOSSES: dict[str, LossFunction] = {
    "ppo": _token_clip,
    "grpo": _token_clip,  # the same function: GRPO differs in its advantages and has no dual clip
    "gspo": _gspo,
    "cispo": _cispo,
    "topr": _topr,
    "reinforce": _reinforce,
}


def register_loss(
    *reads: str, clip: tuple[float, float] | None = None
) -> Callable[[LossFunction], LossFunction]:
    """Register a function as a policy loss under its own name.

    The entropy bonus and the KL term are added to it as to the built-in losses.

    Args:
        reads: The settings of `LossConfig` it reads besides the common ones; other changed settings are
            refused.
        clip: Default ``clip_low`` and ``clip_high``; required if the loss reads them.
    """
    unknown = set(reads) - {field.name for field in fields(LossConfig)}
    if unknown:
        raise UsageError(f"LossConfig has no field {', '.join(sorted(unknown))}.")
    bounds = {"clip_low", "clip_high"} & set(reads)
    if bool(bounds) != (clip is not None):
        raise UsageError("Pass clip=(low, high) if and only if the loss reads clip_low or clip_high.")

    def register(function: LossFunction) -> LossFunction:
        name = function.__name__
        if name in POLICY_LOSSES:
            raise UsageError(f"A policy loss {name!r} is already registered.")
        POLICY_LOSSES[name] = function
        LOSS_SPECS[name] = LossSpec(frozenset(reads)) if clip is None else LossSpec(frozenset(reads), clip)
        return function

    return register
