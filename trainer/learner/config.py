"""Learner configuration. Imports no torch, so that a config error is reported at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rollgym.core.errors import UsageError

BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters: train small matrices beside frozen weights (needs ``peft``)."""

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
class ParallelConfig:
    """The device mesh of ``strategy=mesh``: its dimensions, whose product is the number of ranks.

    Example:
        >>> ParallelConfig(tensor=2).sizes(8)
        {'replicate': 1, 'shard': 4, 'context': 1, 'tensor': 2, 'expert': 1}
    """

    replicate: int = 1
    """Copies of the sharded model; each computes other rows."""
    shard: int | None = None
    """Ranks that weights, gradients and optimizer states are sharded over; ``None``: the remaining ones."""
    context: int = 1
    """Ranks that share the tokens of a row; a divisor of the attention heads."""
    tensor: int = 1
    """Ranks that share the heads, the width of the MLP and the vocabulary."""
    expert: int = 1
    """Ranks that share the experts of a mixture of experts."""

    def __post_init__(self) -> None:
        wrong = [name for name, size in self._given().items() if size is not None and size < 1]
        if wrong:
            raise UsageError(f"learner.parallel.{wrong[0]} must be at least 1.")
        for name, size in (("context", self.context), ("tensor", self.tensor)):
            if self.expert > 1 and size > 1:
                raise UsageError(
                    f"learner.parallel.expert cannot be combined with learner.parallel.{name}: set one of "
                    "them to 1."
                )

    def sizes(self, world: int) -> dict[str, int]:
        """Return the dimensions for a number of ranks, from the slowest to the fastest varying.

        Raises:
            UsageError: Their product is not the number of ranks.
        """
        given = self._given()
        known = math.prod(size for size in given.values() if size is not None)
        if world % known or (self.shard is not None and known != world):
            shown = " x ".join(f"{name} {size}" for name, size in given.items() if size not in (None, 1))
            expected = "divide" if self.shard is None else "equal"
            raise UsageError(
                f"learner.parallel is {shown} = {known}, which must {expected} the number of ranks, {world}: "
                "change its dimensions or the number of devices."
            )
        return {name: world // known if size is None else size for name, size in given.items()}

    def data_ranks(self, world: int) -> int:
        """Return the number of ranks that rows are split between; a context or tensor group is one."""
        return world // (self.context * self.tensor)

    def _given(self) -> dict[str, int | None]:
        return {
            "replicate": self.replicate,
            "shard": self.shard,
            "context": self.context,
            "tensor": self.tensor,
            "expert": self.expert,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """The optimizer, the critic, and the partition of a batch.

    Example:
        >>> LearnerConfig(learning_rate=1e-5, epochs=2, mini_batches=4).schedule
        'constant'
    """

    learning_rate: float = 3e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or decaying to `min_lr_ratio` by the last optimizer step."""
    warmup_steps: int = 0
    """Optimizer steps (not batches) over which the rate rises from 0."""
    min_lr_ratio: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    """Maximum gradient norm; ``None``: no clipping."""
    epochs: int = 1
    """Optimizer epochs per batch."""
    mini_batches: int = 1
    """Mini-batches per epoch, with one optimizer step each."""
    max_tokens_per_microbatch: int = 8192
    """Tokens per forward pass and rank; affects memory and speed, not the gradient. A longer row is computed
    in pieces where rows are packed and strategy=single, else at once."""
    layout: Literal["auto", "padded", "packed"] = "auto"
    """Layout of rows of different lengths in a micro-batch. ``auto``: packed where the model supports it."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Source of the proximal policy's log-probs: recomputed by the learner, or those of the rollout.
    The latter need an engine of the same precision (see ``train_rollout_logprob_diff_max``)."""
    critic: Literal["none", "shared", "separate"] = "none"
    """Value function: a head on the policy's hidden states, or a separate model, which starts as a copy."""
    critic_rate: float | None = None
    """The critic's learning rate; ``None``: the same as ``learning_rate``."""
    value_coef: float = 0.5
    value_clip: float | None = None
    gradient_checkpointing: bool = False
    lora: LoraSettings | None = None
    device: str | None = None
    """Such as ``cpu`` or ``cuda:1``; ``None``: CUDA if available, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] | None = "auto"
    """Compute dtype; weights are float32. ``auto``: bfloat16 on CUDA, and for a model of at least 20 million
    parameters on a CPU that a short measurement finds fast at it. ``None``: bfloat16 on CUDA only."""
    strategy: str = "auto"
    """Parallel strategy: single, ddp, fsdp2, zero1, zero2, zero3, mesh or a registered one. ``auto``: as
    planned; other values require runtime=ray."""
    parallel: ParallelConfig = ParallelConfig()
    """Dimensions of the device mesh of strategy=mesh."""
    threads: int | None = None
    """CPU threads; ``None``: torch's default."""
    router_replay: Literal["auto", "on", "off"] = "auto"
    """Compute mixture-of-experts models with the experts that the engine chose for each token. ``auto``:
    where model and engine report them; ``on``: an error where they do not, and servers are started so that
    they do."""

    def __post_init__(self) -> None:
        rules = {
            "learning_rate >= 0": 0 <= self.learning_rate < math.inf,
            "warmup_steps >= 0": self.warmup_steps >= 0,
            "0 <= min_lr_ratio <= 1": 0 <= self.min_lr_ratio <= 1,
            "clip_norm > 0": self.clip_norm is None or self.clip_norm > 0,
            "epochs >= 1": self.epochs >= 1,
            "mini_batches >= 1": self.mini_batches >= 1,
            "max_tokens_per_microbatch >= 1": self.max_tokens_per_microbatch >= 1,
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
        if self.min_lr_ratio and self.schedule == "constant":
            raise UsageError("min_lr_ratio requires schedule=linear or schedule=cosine.")
        unused = (self.critic_rate, self.value_clip, self.value_coef) != (None, None, 0.5)
        if self.critic == "none" and unused:
            raise UsageError(
                "critic_rate, value_clip and value_coef require a critic: set critic to shared or separate."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """Arguments of a learner that come from the run rather than from the learner's own config."""

    temperature: float = 1.0
    """The engine's sampling temperature: log-probs are those of that distribution."""
    total_steps: int = 1
    """Optimizer steps in the whole run, for the learning rate schedule."""
    seed: int = 0
    """Seed of the partition into mini-batches."""
    share_model: bool = False
    """Train the given model in place instead of a copy. Single-process strategies only."""
    value_only: bool = False
    """Train a separate critic and no policy."""
    keep_reference: bool = True
    """Whether a KL penalty makes this learner keep the reference policy."""
    gap_limit: float | None = None
    """Maximum mean difference in nats between the engine's and the learner's log-probs of tokens sampled by
    the current weights; a larger one raises `RunError` before the update."""
    cpu_offload: bool = False
    """Keep on the CPU whatever the strategy can keep there."""
    bucket_bytes: int = BUCKET_BYTES
    """Bytes of weights that ranks gather at once for an engine or an export."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise UsageError("Training needs a temperature above 0: at 0 nothing is sampled.")
        if self.bucket_bytes < 1:
            raise UsageError(f"bucket_bytes must be at least 1, not {self.bucket_bytes}.")
