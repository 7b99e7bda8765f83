"""Imitation: what a learner changes while it learns from demonstrations, and how it goes on after that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rollgym.trainer.learner.settings import LearnerSettings
from rollgym.trainer.loss_settings import LossSettings

BODY, HEAD = "critic.body.", "critic.head."
"""How the names of a critic's parameters begin: of its own transformer, if it has one, and of its head."""


def imitation_settings(settings: LearnerSettings, rate: float) -> LearnerSettings:
    """The learner's settings with the schedule of imitation: each batch once, and the rate falls linearly."""
    return replace(
        settings,
        learning_rate=rate,
        schedule="linear",
        warmup_steps=0,
        final_share=0.1,
        epochs=1,
        mini_batches=1,
    )


def imitation_loss() -> LossSettings:
    """With advantages of 1 and no correction, this is the negative log-likelihood of the demonstrations."""
    return LossSettings("reinforce", tis_cap=None)


class FreshStart:
    """A checkpoint without optimizer steps: the policy keeps its weights, the critic starts from zero.

    Args:
        names: All trained parameters.
        taught: A model folder. A separate critic's transformer gets its weights.
    """

    steps = 0

    def __init__(self, names: Iterable[str], taught: Path | None) -> None:
        self.parameter_steps = dict.fromkeys(names, 0)
        self._body = {} if taught is None else _body_weights(taught)

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor | None:
        """A stretch of a weight, or ``None`` where it stays."""
        if name.startswith(HEAD):
            return torch.zeros(stop - start)
        if not self._body or not name.startswith(BODY):
            return None
        return self._body[name.removeprefix(BODY)].reshape(-1)[start:stop]


def _body_weights(folder: Path) -> dict[str, Tensor]:
    from rollgym.engines.embedded.model import read_module
    from rollgym.trainer.scoring import parts

    body = parts(read_module(folder, torch.float32))[0]
    return {name: parameter.detach() for name, parameter in body.named_parameters()}
