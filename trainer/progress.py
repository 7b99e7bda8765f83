"""Where a run is: everything that changes from step to step and is neither weights nor files."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rollgym.trainer.config import TrainConfig


@dataclass(slots=True, kw_only=True)
class Progress:
    """Saved with each checkpoint, so that a resumed run goes on as if nothing had happened."""

    step: int = 0
    """Training steps that are done."""
    version: int = 0
    """Of the weights in the engine."""
    stage: int = 0
    """How many environments beyond the first the curriculum has opened."""
    next_ticket: int = 0
    again: list[int] = field(default_factory=list)
    """Tickets handed out but not trained on: they are played again."""
    issues: dict[int, int] = field(default_factory=dict)
    """Of these, the attempt that they begin with: episodes of earlier ones are not trained on."""
    window: list[float] = field(default_factory=list)
    """Success of the newest environment in the last steps."""
    best: float | None = None
    """The best held-out success so far."""
    best_step: int = 0
    last: float | None = None
    """The last one."""
    evaluated: int = 0
    """The last step whose evaluation is done."""
    kl_coef: float = 0.0
    seconds: float = 0.0
    """Of training, over all resumptions."""
    marks: dict[str, int] = field(default_factory=dict)
    """How long the run's files were."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> Progress:
        """From what a checkpoint holds."""
        values = {name: state[name] for name in cls.__dataclass_fields__ if name in state}
        values.setdefault("evaluated", values.get("step", 0))
        values["issues"] = {int(ticket): count for ticket, count in state.get("issues", {}).items()}
        return cls(**values)


class Clock:
    """How long training has taken, resumptions included."""

    def __init__(self, before: float) -> None:
        self._before = before
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Up to now."""
        return self._before + time.monotonic() - self._started


def reason_to_stop(config: TrainConfig, progress: Progress, clock: Clock) -> str | None:
    """Why training is over, or ``None``."""
    stop = config.stop
    if progress.step >= stop.steps:
        return f"all {stop.steps} steps are done"
    if stop.success is not None and progress.last is not None and progress.last >= stop.success:
        return f"held-out success reached {progress.last:.3f}"
    if stop.minutes is not None and clock.seconds >= 60 * stop.minutes:
        return f"{stop.minutes:g} minutes are over"
    return None
