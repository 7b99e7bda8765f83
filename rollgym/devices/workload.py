"""Input of the planner: the models of a training run and the workload of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollgym.core.errors import UsageError
from rollgym.devices.models import ModelShape
from rollgym.devices.types import MeshRequest, Role

Precision = Literal["mixed", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The workload of one training step."""

    episodes: int = 128
    """Episodes per step."""
    in_flight: int = 128
    """Concurrent episodes."""
    prompt_tokens: int = 1024
    """Tokens of an episode that the model reads."""
    reply_tokens: int = 1024
    """Tokens of an episode that the model generates."""
    context: int = 2048
    """Maximum tokens of a conversation."""
    max_tokens_per_microbatch: int = 8192
    """Tokens per microbatch on each device."""
    checkpointing: bool = False
    """Whether activations are recomputed instead of stored."""
    passes: int = 1
    """Optimizer epochs per batch."""
    optimizer_steps: int = 1
    rescore: bool = True
    """Whether the trainer recomputes log-probs before the update."""
    staleness: int = 0
    """Weight versions that rollouts may lag behind; 0: rollouts wait for the update."""

    def __post_init__(self) -> None:
        for name in (
            "episodes",
            "in_flight",
            "prompt_tokens",
            "reply_tokens",
            "context",
            "max_tokens_per_microbatch",
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"A plan needs {name} of at least 1, not {getattr(self, name)}.")

    @property
    def tokens(self) -> int:
        """Tokens of all episodes of a step."""
        return self.episodes * (self.prompt_tokens + self.reply_tokens)

    @property
    def longest(self) -> int:
        """Largest number of tokens in a microbatch: a conversation is never split."""
        return self.microbatch(1)

    def microbatch(self, context: int) -> int:
        """Return the largest number of tokens in a microbatch that so many context parallel ranks share."""
        return max(context * self.max_tokens_per_microbatch, self.context)

    @property
    def reply_share(self) -> float:
        """Fraction of generated tokens: only for these are logits computed."""
        return self.reply_tokens / (self.prompt_tokens + self.reply_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The models and workload of a run. Roles without a model are not placed."""

    actor: ModelShape
    critic: ModelShape | None = None
    """A separate critic; a value head on the actor is not a role."""
    reference: ModelShape | None = None
    reward: ModelShape | None = None
    lora_rank: int | None = None
    """LoRA rank of the actor; None: full fine-tuning."""
    precision: Precision = "mixed"
    """``mixed``: learners compute in bfloat16 with float32 weights, engines use bfloat16. ``float32``:
    float32 throughout, as on CPUs."""
    tensor_parallel_engine: bool = True
    """Whether the engine can use several devices; the embedded engine cannot."""
    mesh: MeshRequest | None = None
    """The requested mesh of the actor's training ranks; ``None``: the planner chooses."""
    choose_mesh: bool = True
    """Whether the planner may choose a mesh; otherwise all ranks shard, if any."""
    choose_context: bool = True
    """Whether such a mesh may have context parallel ranks, which need packed rows and no router replay."""
    workload: Workload = field(default_factory=Workload)

    def models(self) -> dict[Role, ModelShape]:
        """Return the model of each role."""
        models: dict[Role, ModelShape | None] = {
            "actor_train": self.actor,
            "actor_infer": self.actor,
            "critic": self.critic,
            "reference": self.reference,
            "reward": self.reward,
        }
        return {role: model for role, model in models.items() if model is not None}

    @property
    def bytes_each(self) -> int:
        """Bytes per number in the compute precision."""
        return 4 if self.precision == "float32" else 2
