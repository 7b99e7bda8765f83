"""What a plan is made for: the models of a training run, and how much work one step is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollgym.devices.models import ModelShape
from rollgym.devices.types import Role
from rollgym.errors import UsageError

Precision = Literal["mixed", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step."""

    episodes: int = 128
    """That are played for it."""
    in_flight: int = 128
    """Episodes at once."""
    prompt_tokens: int = 1024
    """Of a whole episode: what the model reads."""
    reply_tokens: int = 1024
    """Of a whole episode: what it writes."""
    context: int = 2048
    """The longest conversation, for which there must be room."""
    micro_tokens: int = 8192
    """Trained on at once, on each device."""
    checkpointing: bool = False
    """Whether activations are computed again instead of kept."""
    passes: int = 1
    """How often each episode is trained on."""
    optimiser_steps: int = 1
    rescore: bool = True
    """Whether the trainer computes log-probs of its own before the update."""
    staleness: int = 0
    """How many versions old weights may be that experience comes from; 0: rollouts wait for the update."""

    def __post_init__(self) -> None:
        for name in ("episodes", "in_flight", "prompt_tokens", "reply_tokens", "context", "micro_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"A plan needs {name} of at least 1, not {getattr(self, name)}.")

    @property
    def tokens(self) -> int:
        """Of all episodes of a step."""
        return self.episodes * (self.prompt_tokens + self.reply_tokens)

    @property
    def longest(self) -> int:
        """Tokens in memory at once: a conversation is never cut."""
        return max(self.micro_tokens, self.context)

    @property
    def reply_share(self) -> float:
        """Share of the tokens that are the model's own: only for those the vocabulary is computed."""
        return self.reply_tokens / (self.prompt_tokens + self.reply_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The models of a run. Roles without a model do not take part."""

    actor: ModelShape
    critic: ModelShape | None = None
    """A critic of its own; a value head on the actor is no role."""
    reference: ModelShape | None = None
    reward: ModelShape | None = None
    lora_rank: int | None = None
    """The actor trains matrices of this rank only."""
    precision: Precision = "mixed"
    """``mixed``: learners compute in two bytes and keep four; engines have two. ``float32``: four throughout,
    as on CPUs."""
    work: Workload = field(default_factory=Workload)

    def models(self) -> dict[Role, ModelShape]:
        """Each role's model."""
        found: dict[Role, ModelShape | None] = {
            "actor_train": self.actor,
            "actor_infer": self.actor,
            "critic": self.critic,
            "reference": self.reference,
            "reward": self.reward,
        }
        return {role: model for role, model in found.items() if model is not None}

    @property
    def bytes_each(self) -> int:
        """Of a number that is computed with."""
        return 4 if self.precision == "float32" else 2
