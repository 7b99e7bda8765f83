"""Session: one lease in a worker process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from rollgym.core.errors import RollgymError, UsageError
from rollgym.core.serialization import clean_text
from rollgym.core.types import EpisodeSpec
from rollgym.pool.base import EnvSession, LeaseLost, Reset, Step
from rollgym.pool.protocol import Act, Begin, End, encode

if TYPE_CHECKING:
    from rollgym.pool.worker_handle import WorkerHandle

Op = Literal["reset", "step", "close"]


class LocalSession(EnvSession):
    """One lease in a worker process. The environment is made (or taken from the idle ones) by `reset`."""

    __slots__ = (
        "_lease",
        "_lost",
        "_open",
        "_spec",
        "_waiter",
        "_worker",
        "asked_at",
        "grown_mb",
        "healthy",
        "op",
    )

    def __init__(self, worker: WorkerHandle, lease: int, spec: EpisodeSpec) -> None:
        self._worker = worker
        self._lease = lease
        self._spec = spec
        self._open = True
        self._lost: LeaseLost | None = None
        self._waiter: asyncio.Future[Any] | None = None
        self.healthy = True
        self.grown_mb = 0.0
        """Memory growth of the worker during the episode's calls in MB, where measured."""
        self.op: Op = "reset"
        """Last call."""
        self.asked_at: float | None = None
        """Time of the pending call on the worker's clock; ``None`` if there is none."""

    @property
    def episode(self) -> str:
        """The id of the episode that has the lease."""
        return self._spec.episode_id

    async def reset(self) -> Reset:
        """Start the episode."""
        self.op = "reset"
        result: Reset = await self._ask(encode(Begin(self._lease, self._spec)))
        return result

    async def step(self, action: str) -> Step:
        """Play one action."""
        self.op = "step"
        result: Step = await self._ask(encode(Act(self._lease, clean_text(action))))
        return result

    async def close(self) -> None:
        """Return the environment to the pool."""
        if self._open:
            self._open = False
            self._worker.in_use -= 1
            if self.asked_at is None:  # otherwise a cancelled call still runs, and closing waits for it
                self.op = "close"
            if self._lost is None:
                self.asked_at = self._worker.clock
                self._worker.post(encode(End(self._lease, self.healthy)))

    async def _ask(self, message: bytes) -> Any:
        if self._lost is not None:
            raise self._lost
        if not self._open or self.asked_at is not None:
            raise UsageError("A session accepts one call at a time, and none after close().")
        worker = self._worker
        waiter = self._waiter = worker.loop.create_future()
        self.asked_at = worker.clock
        # Not healthy until the answer arrives: a cancelled call also leaves the environment mid-episode.
        self.healthy = False
        worker.post(message)
        try:
            result = await waiter
        finally:
            self._waiter = None
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # mark as retrieved, even if a cancellation came first
        self.healthy = True
        return result

    # Called by the worker handle.

    def answer(self, result: Reset | Step | None) -> None:
        """Deliver the answer; dropped if the call was cancelled."""
        self._answered()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(result)

    def fail(self, error: RollgymError) -> None:
        """Fail the pending call."""
        self._answered()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _answered(self) -> None:
        if self._open:
            self.asked_at = None
        else:
            self.op = "close"

    def lose(self, error: LeaseLost) -> None:
        """Fail the pending call and every later one: the worker is lost."""
        self._lost = error
        self.fail(error)
