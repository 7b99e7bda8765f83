"""The state of a run that is neither weights nor files: counters, stop conditions, stop requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from rollgym.trainer.config import TrainConfig
from rollgym.trainer.losses.adaptive import Coefficients


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Counters that every checkpoint stores, so that a resumed run continues exactly."""

    step: int = 0
    """Training steps done."""
    version: int = 0
    """Version of the weights in the engine."""
    stage: int = 0
    """Curriculum stage: the number of environments opened beyond the first."""
    next_group: int = 0
    """Number of the next group to start."""
    unfinished_groups: list[int] = field(default_factory=list)
    """Groups that were started but not trained on: they are played again."""
    first_attempts: dict[int, int] = field(default_factory=dict)
    """The first attempt number of each of these groups: earlier attempts are not trained on."""
    window: list[float] = field(default_factory=list)
    """Success rate of the newest environment in the last steps, for the curriculum."""
    pass_rates: list[float | None] = field(default_factory=list)
    """Moving average of the success of each environment, for the curriculum by pass rate."""
    reweighed: list[tuple[int, list[float]]] = field(default_factory=list)
    """First group and weights of the environments, each time that curriculum changed them."""
    best: float | None = None
    """Best held-out success so far."""
    best_step: int = 0
    last: float | None = None
    """Held-out success of the last evaluation."""
    evaluated: int = 0
    """Last step with a complete evaluation."""
    past_step: int = 0
    """Training step of the weights of the past version of the policy, if a role has it."""
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    seconds: float = 0.0
    """Training time in seconds, summed over all resumptions."""
    marks: dict[str, int] = field(default_factory=dict)
    """Size of each log file in bytes."""

    @property
    def coefficients(self) -> Coefficients:
        """The current coefficients of the KL penalty and the entropy bonus."""
        return Coefficients(self.kl_coef, self.entropy_coef)

    @coefficients.setter
    def coefficients(self, coefficients: Coefficients) -> None:
        self.kl_coef, self.entropy_coef = coefficients

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> TrainState:
        """Restore the state from `to_json`."""
        values = {name: state[name] for name in cls.__dataclass_fields__ if name in state}
        values.setdefault("evaluated", values.get("step", 0))
        values["first_attempts"] = {
            int(group): count for group, count in state.get("first_attempts", {}).items()
        }
        return cls(**values)


class Clock:
    """Training time, including the time before a resume."""

    def __init__(self, before: float) -> None:
        self._before = before
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._before + time.monotonic() - self._started


def reason_to_stop(config: TrainConfig, state: TrainState, clock: Clock) -> str | None:
    """The stop condition that holds now, or ``None``."""
    stop = config.stop
    if state.step >= stop.steps:
        return f"all {stop.steps} steps are done"
    if stop.success is not None and state.last is not None and state.last >= stop.success:
        return f"held-out success reached {state.last:.3f}"
    if stop.minutes is not None and clock.seconds >= 60 * stop.minutes:
        return f"{stop.minutes:g} minutes are over"
    return None


class GracefulStop:
    """A request to stop early (Ctrl-C, SIGTERM, a cancelled task), answered between two pieces of work."""

    def __init__(self) -> None:
        self.requested = False
        self.notify: Callable[[str], None] = lambda text: None
        self._deferred = 0
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def request(self) -> None:
        """Stop after the current step, or now if none is running. Called inside the event loop."""
        self.requested = True
        if self._deferred:
            self.notify("stopping after this step; press Ctrl-C again to stop immediately")
        elif self._task is not None:
            self._task.cancel()

    def request_threadsafe(self) -> None:
        """Request a stop from another thread."""
        self.requested = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.request)

    def check(self) -> None:
        """Raise `asyncio.CancelledError` if a stop was requested."""
        if self.requested:
            raise asyncio.CancelledError

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Finish the block before a request to stop takes effect."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1

    @contextmanager
    def cancels_current_task(self) -> Iterator[None]:
        """Inside the block a request to stop cancels the current task."""
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        try:
            yield
        finally:
            self._task = self._loop = None
