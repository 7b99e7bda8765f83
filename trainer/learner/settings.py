"""How a learner learns. Nothing here imports torch, so that a mistake in a configuration is found at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rollgym.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Train small matrices beside the model's own, which stay as they are (needs ``peft``)."""

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise UsageError(f"LoRA needs rank >= 1 and alpha > 0, not {self.rank} and {self.alpha}.")
        if self.dropout:
            raise UsageError("LoRA dropout must be 0: with it, log-probs would differ from the engine's.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """The optimiser, and how a batch is cut up."""

    learning_rate: float = 3e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: as it is, or down to `final_share` of it by the last optimiser step."""
    warmup_steps: int = 0
    """Optimiser steps, not batches, over which the rate rises from 0."""
    final_share: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    """The greatest norm of a gradient."""
    epochs: int = 1
    """How often each batch is gone through."""
    mini_batches: int = 1
    """Into how many parts a batch is dealt, with an optimiser step for each."""
    micro_tokens: int = 8192
    """Tokens in memory at once; a matter of memory and speed alone."""
    layout: Literal["auto", "padded", "packed"] = "auto"
    """How rows of different lengths share a micro-batch. ``auto``: packed."""
    old_logprobs: Literal["recompute", "behaviour"] = "recompute"
    """Where the proximal policy's log-probs come from: a pass of the trainer's own, or the engine's word for
    it. The engine's will do where it computes in the same precision (`logprob_gap_max` says)."""
    critic: Literal["none", "head", "own"] = "none"
    """Values by a head on the policy's states, or by a model of its own, which starts as a copy."""
    critic_rate: float | None = None
    """The critic's learning rate; ``None``: the same."""
    value_coef: float = 0.5
    value_clip: float | None = None
    gradient_checkpointing: bool = False
    lora: LoraSettings | None = None
    device: str | None = None
    """Such as ``cpu`` or ``cuda:1``; CUDA where there is one, else the processor."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of what is computed; the weights are float32. ``None``: float32 on a processor, bfloat16 on CUDA."""
    threads: int | None = None
    """On a processor; ``None``: what torch chooses."""

    def __post_init__(self) -> None:
        rules = {
            "learning_rate >= 0": 0 <= self.learning_rate < math.inf,
            "warmup_steps >= 0": self.warmup_steps >= 0,
            "0 <= final_share <= 1": 0 <= self.final_share <= 1,
            "clip_norm > 0": self.clip_norm is None or self.clip_norm > 0,
            "epochs >= 1": self.epochs >= 1,
            "mini_batches >= 1": self.mini_batches >= 1,
            "micro_tokens >= 1": self.micro_tokens >= 1,
            "0 <= betas < 1": all(0 <= beta < 1 for beta in self.betas),
            "eps > 0": self.eps > 0,
            "weight_decay >= 0": 0 <= self.weight_decay < math.inf,
            "critic_rate >= 0": self.critic_rate is None or 0 <= self.critic_rate < math.inf,
            "value_coef >= 0": 0 <= self.value_coef < math.inf,
            "value_clip > 0": self.value_clip is None or self.value_clip > 0,
            "threads >= 1": self.threads is None or self.threads >= 1,
        }
        for rule, holds in rules.items():
            if not holds:
                raise UsageError(f"The learner needs {rule}.")
        if self.final_share and self.schedule == "constant":
            raise UsageError("final_share is read by the schedules linear and cosine; choose one of them.")
        unread = (self.critic_rate, self.value_clip, self.value_coef) != (None, None, 0.5)
        if self.critic == "none" and unread:
            raise UsageError(
                "critic_rate, value_clip and value_coef are read with a critic: set critic to head or own."
            )


def rate_at(settings: LearnerSettings, step: int, total: int) -> float:
    """The share of the learning rate at an optimiser step; the last of ``total`` has ``final_share``."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    span = max(total - 1 - settings.warmup_steps, 1)
    done = min(max((step - settings.warmup_steps) / span, 0.0), 1.0)
    if settings.schedule == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return 1.0 + (settings.final_share - 1.0) * done
