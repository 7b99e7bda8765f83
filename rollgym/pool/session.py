"""One lease in a worker process, as the scheduler sees it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from rollgym.errors import RollgymError, UsageError
from rollgym.pool import LeaseLost, Reset, Step
from rollgym.pool.wire import Act, Begin, End, encode
from rollgym.records import clean_text
from rollgym.types import EpisodeSpec

if TYPE_CHECKING:
    from rollgym.pool.link import Worker

Op = Literal["reset", "step", "close"]


class LocalSession:
    """One lease in a worker process. The environment is made (or taken from the idle ones) by `reset`."""

    __slots__ = (
        "_lease",
        "_lost",
        "_open",
        "_spec",
        "_waiter",
        "_worker",
        "asked",
        "grown_mb",
        "healthy",
        "op",
    )

    def __init__(self, worker: Worker, lease: int, spec: EpisodeSpec) -> None:
        self._worker = worker
        self._lease = lease
        self._spec = spec
        self._open = True
        self._lost: LeaseLost | None = None
        self._waiter: asyncio.Future[Any] | None = None
        self.healthy = True
        self.grown_mb = 0.0
        """By how much the worker grew during the episode's calls, where it weighs them."""
        self.op: Op = "reset"
        """The last call that was made."""
        self.asked: float | None = None
        """When the call that is not answered yet was made, on the worker's clock."""

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
        """Give the environment back."""
        if self._open:
            self._open = False
            self._worker.in_use -= 1
            if self.asked is None:  # else a cancelled call still runs, and closing waits for it
                self.op = "close"
            if self._lost is None:
                self.asked = self._worker.clock
                self._worker.say(encode(End(self._lease, self.healthy)))

    async def _ask(self, message: bytes) -> Any:
        if self._lost is not None:
            raise self._lost
        if not self._open or self.asked is not None:
            raise UsageError("A session makes one call at a time, and none once it is closed.")
        worker = self._worker
        waiter = self._waiter = worker.loop.create_future()
        self.asked = worker.clock
        # Not healthy until the answer is there: also a cancelled call leaves the environment in the middle.
        self.healthy = False
        worker.say(message)
        try:
            result = await waiter
        finally:
            self._waiter = None
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # seen, even where a cancellation came first
        self.healthy = True
        return result

    # What the worker's link calls.

    def answer(self, result: Reset | Step | None) -> None:
        """The answer is there; it goes to nobody where the call was cancelled."""
        self._answered()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(result)

    def fail(self, error: RollgymError) -> None:
        """The call failed."""
        self._answered()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _answered(self) -> None:
        if self._open:
            self.asked = None
        else:
            self.op = "close"

    def lose(self, error: LeaseLost) -> None:
        """The worker is gone, and this call with it, and every further one."""
        self._lost = error
        self.fail(error)
