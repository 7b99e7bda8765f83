"""Settings of on-policy and offline distillation. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from rollgym.config.loader import Settings


class TeacherConfig(Settings):
    """A model whose distribution the policy learns; it must have the policy's tokenizer."""

    path: str
    """Model folder, Hub id, or a name such as smollm2."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this teacher among several; shares are divided by their sum."""


class DistillConfig(Settings):
    """On-policy distillation: each sampled token is rewarded by the log-ratio of teacher and policy."""

    teachers: list[TeacherConfig] = Field(min_length=1)
    """The teachers; with several, the weighted mean of their log-probs counts."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of the distillation advantage: the negative reverse KL estimate of each sampled token."""
    reward_weight: float = Field(default=1.0, ge=0)
    """Weight of the advantages from rewards; 0 trains on the teachers alone."""


class OfflineDistillConfig(Settings):
    """Offline distillation: every learned token of the data is trained towards the teachers' distribution."""

    teachers: list[TeacherConfig] = Field(min_length=1)
    """The teachers; with several, the weighted mean of their probabilities is learned."""
    top_k: int = Field(default=32, ge=1)
    """Tokens of each teacher that count, the most likely ones; their probabilities are divided by their
    sum. From the size of the vocabulary on, the forward KL is exact."""
