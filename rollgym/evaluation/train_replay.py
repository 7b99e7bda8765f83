"""Replay of training runs, which the trainer registers: the command line imports no trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rollgym.core.errors import UsageError

__all__ = ["TrainReplay", "register_train_replay", "replay_training"]


class TrainReplay(Protocol):
    """The result of repeating a run's updates."""

    @property
    def same(self) -> bool:
        """True if batches, metrics and weights equal the recorded ones."""

    def lines(self) -> list[str]:
        """The result as lines of text."""

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""


_train_replays: list[Callable[[Path, bool], TrainReplay]] = []


def register_train_replay(replay: Callable[[Path, bool], TrainReplay]) -> None:
    """Let `replay_training` call this function of the trainer, with a run folder and ``trust_code``."""
    _train_replays.append(replay)


def replay_training(run: Path, *, trust_code: bool = False) -> TrainReplay:
    """Repeat the updates of a training run from its logs, without rollouts; see `rollgym.trainer.replay`."""
    if not _train_replays:
        raise UsageError("Replaying a training run requires the trainer, which is not installed.")
    return _train_replays[-1](run, trust_code)
