"""Settings of on-policy and offline distillation. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from rollgym.config.loader import Settings
from rollgym.core.errors import UsageError


class TeacherConfig(Settings):
    """A model whose distribution the policy learns; it must have the policy's tokenizer."""

    path: str
    """Model folder, Hub id, or a name such as smollm2. With ``url`` only its tokenizer is read."""
    url: str | None = None
    """Address of a running vLLM or SGLang server with the teacher's model. Default: the weights in ``path``
    are loaded in the trainer. Requires agent.temperature=1: servers score tokens at temperature 1."""
    api_key_env: str | None = None
    """Environment variable that holds the API key of the server at ``url``."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this teacher among several; shares are divided by their sum."""


def check_teachers(teachers: Sequence[TeacherConfig], temperature: float, runtime: str) -> None:
    """Raise `UsageError` for teachers that cannot be used at this temperature or on this runtime."""
    for number, teacher in enumerate(teachers):
        key = f"distill.teachers.{number}"
        if teacher.url is None and teacher.api_key_env is not None:
            raise UsageError(f"{key}.api_key_env requires {key}.url: a model in the trainer has no key.")
        if teacher.url is None and runtime == "ray":
            raise UsageError(
                f"{key} requires runtime=local, or a url: with runtime=ray a teacher must be on a vLLM or "
                "SGLang server."
            )
        if teacher.url is not None and temperature != 1:
            raise UsageError(
                f"{key}.url requires agent.temperature=1, not {temperature:g}: servers score tokens at "
                "temperature 1. Without url the teacher is loaded in the trainer, at any temperature."
            )


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
