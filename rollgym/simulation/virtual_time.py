"""An asyncio event loop in virtual time: its clock jumps to the next timer whenever every task waits."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rollgym.core.errors import RunError

T = TypeVar("T")


class Deadlock(RunError):
    """Every task waits, and no timer will wake any of them."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is virtual. Nothing comes from outside: no sockets, threads or processes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.complaints: list[dict[str, Any]] = []
        """Exceptions that no task handled."""
        super().__init__()
        # Without anything to wait for outside, the operating system need not be asked.
        self._selector.select = lambda timeout=None: []  # type: ignore[attr-defined]
        self.set_exception_handler(lambda loop, context: self.complaints.append(context))

    def time(self) -> float:
        """Virtual seconds since the loop began."""
        return self.now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = self._scheduled  # type: ignore[attr-defined]
            while timers and timers[0]._cancelled:
                self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
                heapq.heappop(timers)._scheduled = False
            if not timers:
                raise Deadlock("Nothing is ready and nothing is scheduled.")
            self.now = max(self.now, timers[0]._when)
        super()._run_once()  # type: ignore[misc]


def run_virtual(main: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function in virtual time and return its result. Tasks left over are cancelled."""
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(main())
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        if loop.complaints:
            raise RunError(f"An exception was not handled: {loop.complaints[0]}")
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
