"""Imitation learning: the learner's config and loss for demonstrations, and its fresh start afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rollgym.trainer.learner.boxes import Box
from rollgym.trainer.learner.config import LearnerConfig
from rollgym.trainer.losses.settings import LossConfig

BODY, HEAD = "critic.body.", "critic.head."
"""Name prefixes of a critic's parameters: those of a separate transformer, and those of its head."""


def imitation_config(config: LearnerConfig, rate: float) -> LearnerConfig:
    """Return the learner's config for imitation: one epoch per batch, and a linearly decaying rate."""
    return replace(
        config,
        learning_rate=rate,
        schedule="linear",
        warmup_steps=0,
        min_lr_ratio=0.1,
        epochs=1,
        mini_batches=1,
        router_replay="auto",  # demonstrations have no recorded experts
    )


def imitation_loss() -> LossConfig:
    """Return a loss that is the negative log-likelihood of demonstrations, which have advantages of 1."""
    return LossConfig("reinforce", tis_cap=None)


class FreshStart:
    """A checkpoint without optimizer steps: the policy keeps its weights, the critic starts from zero.

    Args:
        names: All trained parameters.
        taught: A model folder, whose weights a separate critic's transformer gets.
    """

    steps = 0

    def __init__(self, names: Iterable[str], taught: Path | None) -> None:
        self.parameter_steps = dict.fromkeys(names, 0)
        self._body = {} if taught is None else _body_weights(taught)

    def read(self, name: str, key: str, start: int, stop: int) -> Tensor | None:
        """Return a range of a weight, or ``None`` to keep the current values."""
        if name.startswith(HEAD):
            return torch.zeros(stop - start)
        if not self._body or not name.startswith(BODY):
            return None
        return self._body[name.removeprefix(BODY)].reshape(-1)[start:stop]

    def read_box(self, name: str, key: str, box: Box) -> Tensor | None:
        """Return a box of a weight, or ``None`` to keep the current values."""
        if name.startswith(HEAD):
            return torch.zeros(box.sizes)
        if not self._body or not name.startswith(BODY):
            return None
        return self._body[name.removeprefix(BODY)][box.slices()]


def _body_weights(folder: Path) -> dict[str, Tensor]:
    from rollgym.engines.embedded.model import read_module
    from rollgym.trainer.learner.forward import parts

    body = parts(read_module(folder, torch.float32))[0]
    return {name: parameter.detach() for name, parameter in body.named_parameters()}
