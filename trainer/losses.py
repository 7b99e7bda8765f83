"""Policy and value losses: pure functions of the action tokens of one micro-batch.

Every loss is the sum of weight times per-token loss, with weights made over the whole batch
(`rollgym.trainer.weighting`): micro-batches just add up. A micro-batch holds whole rows.

A token of weight 0 is masked: whatever stands there, even NaN, it has log-prob 0 and ratio 1, and is in no
loss, gradient or metric.

Three policies: *behaviour* sampled the tokens (the engine's log-probs), *proximal* is the trainer's own
policy as the update began (``old``), *current* is the one being changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rollgym.errors import UsageError
from rollgym.trainer.kl import LOG_RATIO_LIMIT, bounded_exp, kl_per_token
from rollgym.trainer.loss_metrics import Metric, max_of, mean_of, sum_of
from rollgym.trainer.loss_settings import LOSS_SPECS, LossSettings, LossSpec

__all__ = [
    "LOSS_SPECS",
    "POLICY_LOSSES",
    "LossResult",
    "LossSettings",
    "PerToken",
    "Tokens",
    "policy_loss",
    "register_loss",
    "value_loss",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The action tokens of whole rows. All are ``[N]``, and only the current policy's have a gradient."""

    logprobs: Tensor
    """Of the current policy, with gradient."""
    old: Tensor
    """Of the proximal policy: the trainer's own, before the first step of the update."""
    behaviour: Tensor
    """The engine's, of the distribution that was really sampled from."""
    advantages: Tensor
    weights: Tensor
    """From `rollgym.trainer.weighting`; 0 masks a token."""
    rows: Tensor
    """int64: what each token shares a ratio with, 0 to R-1: its row or, by `ratio_level`, its episode."""
    entropy: Tensor | None = None
    """Of the current policy's whole distribution at each token, with gradient."""
    reference: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            # [N] with [N, 1] would broadcast to [N, N] without a word.
            if value.shape != self.logprobs.shape or value.dim() != 1:
                raise ValueError(f"{field.name} has shape {tuple(value.shape)}; all tokens are flat, [N]")
            # Clipping is off where "old" moves with the current policy: that the caller forgot to detach.
            if value.requires_grad and field.name not in ("logprobs", "entropy"):
                raise ValueError(f"{field.name} has a gradient: compute it before the update, without one")

    @property
    def mask(self) -> Tensor:
        """True where a token counts."""
        return self.weights != 0

    def masked(self) -> Tokens:
        """The same, with zeros wherever the weight is 0."""
        mask = self.mask
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{k: torch.where(mask, v, 0) for k, v in values.items() if v is not None})


@dataclass(frozen=True, slots=True)
class LossResult:
    """A part of the batch's loss; parts add up. Metrics are joined by `loss_metrics.merge`."""

    loss: Tensor
    metrics: dict[str, Metric]


PerToken = tuple[Tensor, dict[str, Tensor]]
"""The loss of each token, and what to average over tokens for the log."""
Rule = Callable[[Tokens, LossSettings], PerToken]


def policy_loss(tokens: Tokens, settings: LossSettings) -> LossResult:
    """The loss that ``settings`` name, with its entropy bonus and KL term."""
    tokens = tokens.masked()
    per_token, means = POLICY_LOSSES[settings.name](tokens, settings)
    terms = {"policy_loss": tokens.weights * per_token} | _extra_terms(tokens, settings)
    metrics = {name: sum_of(term) for name, term in terms.items()} | _log_of(tokens)
    metrics |= {name: mean_of(values, tokens.mask) for name, values in means.items()}
    if "ratio" in means:
        metrics["ratio_max"] = max_of(means["ratio"], tokens.mask)
    return LossResult(sum((term.sum() for term in terms.values()), tokens.weights.new_zeros(())), metrics)


def _extra_terms(tokens: Tokens, settings: LossSettings) -> dict[str, Tensor]:
    terms = {}
    if settings.entropy_coef:
        if tokens.entropy is None:
            raise UsageError("entropy_coef is set, but the tokens came without their entropy")
        terms["entropy_loss"] = -settings.entropy_coef * tokens.weights * tokens.entropy
    if settings.kl_coef and settings.kl_in == "loss":
        if tokens.reference is None:
            raise UsageError("kl_coef is set, but the tokens came without a reference policy's log-probs")
        kl = kl_per_token(tokens.logprobs, tokens.reference, settings.estimator)
        terms["kl_loss"] = settings.kl_coef * tokens.weights * kl
    return terms


def _log_of(tokens: Tokens) -> dict[str, Metric]:
    """What is worth knowing whatever the loss. KLs are by k3, the best of the three as a number."""
    gap, mask = (tokens.old - tokens.behaviour).abs(), tokens.mask
    found = {
        "logprob_gap": mean_of(gap, mask),
        "logprob_gap_max": max_of(gap, mask),
        "approx_kl": mean_of(kl_per_token(tokens.old, tokens.logprobs, "k3"), mask),
    }
    if tokens.entropy is not None:
        found["entropy"] = mean_of(tokens.entropy, mask)
    if tokens.reference is not None:
        found["reference_kl"] = mean_of(kl_per_token(tokens.logprobs, tokens.reference, "k3"), mask)
    return found


def _importance(tokens: Tokens, settings: LossSettings) -> PerToken:
    """Truncated importance weights, proximal over behaviour. They never carry a gradient."""
    if settings.tis_cap is None or not settings.decoupled:
        return torch.ones_like(tokens.weights), {}
    full = bounded_exp(tokens.old - tokens.behaviour)
    weight = full.clamp(max=settings.tis_cap)
    log = {
        "importance": weight,
        "importance_squared": weight**2,
        "importance_capped": full > settings.tis_cap,
    }
    return weight, log


def _log_ratio(tokens: Tokens, settings: LossSettings) -> Tensor:
    return tokens.logprobs - (tokens.old if settings.decoupled else tokens.behaviour)


def _ratio_log(ratio: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    return {"ratio": ratio, "ratio_cut_off": log_ratio > LOG_RATIO_LIMIT}


def _row_sums(values: Tensor, rows: Tensor) -> Tensor:
    """For each token, the sum over its row."""
    count = int(rows.max()) + 1 if len(rows) else 0
    return values.new_zeros(count).index_add(0, rows, values)[rows]


def _clipped(tokens: Tokens, log_ratio: Tensor, settings: LossSettings) -> PerToken:
    """PPO's clipped surrogate for ratios of any kind."""
    (low, high), advantages, ratio = settings.clip, tokens.advantages, bounded_exp(log_ratio)
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    weight, log = _importance(tokens, settings)
    log |= _ratio_log(ratio, log_ratio)
    log["clipped_low"] = (ratio < 1 - low) & (advantages < 0)
    log["clipped_high"] = (ratio > 1 + high) & (advantages > 0)
    if settings.dual_clip is not None:
        floor = torch.where(advantages < 0, settings.dual_clip * advantages, -torch.inf)
        log["clipped_dual"] = gain < floor
        gain = torch.maximum(gain, floor)
    return -weight * gain, log


def _token_clip(tokens: Tokens, settings: LossSettings) -> PerToken:
    """PPO (arXiv 1707.06347), with dual clip (1912.09729), decoupled (2505.24298). GRPO's is the same."""
    return _clipped(tokens, _log_ratio(tokens, settings), settings)


def _gspo(tokens: Tokens, settings: LossSettings) -> PerToken:
    """GSPO (arXiv 2507.18071) as its token form: a row's mean log-ratio, with each token's own gradient."""
    lengths = _row_sums(tokens.mask.to(tokens.weights), tokens.rows).clamp(min=1)
    mean = _row_sums(_log_ratio(tokens, settings).detach(), tokens.rows) / lengths
    return _clipped(tokens, mean + tokens.logprobs - tokens.logprobs.detach(), settings)


def _cispo(tokens: Tokens, settings: LossSettings) -> PerToken:
    """CISPO (arXiv 2506.13585): the ratio is a bounded weight without gradient; no token is dropped."""
    low, high = settings.clip
    log_ratio = _log_ratio(tokens, settings).detach()
    ratio = bounded_exp(log_ratio)
    weight, log = _importance(tokens, settings)
    log |= _ratio_log(ratio, log_ratio) | {"clipped_low": ratio < 1 - low, "clipped_high": ratio > 1 + high}
    return -weight * ratio.clamp(1 - low, 1 + high) * tokens.advantages * tokens.logprobs, log


def _topr(tokens: Tokens, settings: LossSettings) -> PerToken:
    """TOPR (arXiv 2503.14286): the ratio of whole rows to the behaviour policy, bounded by the sign."""
    log_ratio = _row_sums((tokens.logprobs - tokens.behaviour).detach(), tokens.rows)
    ratio, good = bounded_exp(log_ratio), tokens.advantages >= 0
    taper = torch.where(good, ratio.clamp(*settings.topr_positive), ratio.clamp(*settings.topr_negative))
    log = _ratio_log(ratio, log_ratio) | {"taper": taper}
    return -taper * tokens.advantages * tokens.logprobs, log


def _reinforce(tokens: Tokens, settings: LossSettings) -> PerToken:
    """REINFORCE, with importance weights where `tis_cap` is set."""
    weight, log = _importance(tokens, settings)
    return -weight * tokens.advantages * tokens.logprobs, log


POLICY_LOSSES: dict[str, Rule] = {
    "ppo": _token_clip,
    "grpo": _token_clip,  # one function: GRPO differs in its advantages, and has no dual clip
    "gspo": _gspo,
    "cispo": _cispo,
    "topr": _topr,
    "reinforce": _reinforce,
}


def register_loss(*reads: str, clip: tuple[float, float] | None = None) -> Callable[[Rule], Rule]:
    """Register a function as a policy loss under its own name.

    Entropy bonus and KL term are added to it as to any other.

    Args:
        reads: The settings of `LossSettings` that it reads besides; others that are changed are refused.
        clip: How far its ratio may go below and above 1 where nobody says; for a loss that reads the bounds.
    """
    unknown = set(reads) - {field.name for field in fields(LossSettings)}
    if unknown:
        raise UsageError(f"LossSettings has no {', '.join(sorted(unknown))} that a loss could read.")
    bounds = {"clip_low", "clip_high"} & set(reads)
    if bool(bounds) != (clip is not None):
        raise UsageError(
            "A loss that reads clip_low or clip_high says which are its own (clip=), and no other does."
        )

    def register(rule: Rule) -> Rule:
        name = rule.__name__
        if name in POLICY_LOSSES:
            raise UsageError(f"There is a policy loss {name!r} already.")
        POLICY_LOSSES[name] = rule
        LOSS_SPECS[name] = LossSpec(frozenset(reads)) if clip is None else LossSpec(frozenset(reads), clip)
        return rule

    return register


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float | None = None
) -> LossResult:
    """Half the squared error of a value head; with ``clip``, the worse of that and of a bounded step.

    The bounded step is the new value held within ``clip`` of the old one, as in PPO.
    """
    if clip is not None and not clip > 0:
        raise UsageError(f"the value clip must be above 0, not {clip}; None turns it off")
    if not values.shape == old_values.shape == returns.shape == weights.shape:
        raise ValueError("values, old values, returns and weights must have the same shape, [N]")
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
