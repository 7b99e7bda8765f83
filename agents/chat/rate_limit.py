"""A rate limit that all players of an agent share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class RateLimiter:
    """A token bucket: a number of units per minute, first come first served.

    Its state is one number, the time at which everything taken so far is refilled. `take` waits while that is
    in the future, and may itself take more than the bucket holds.
    """

    def __init__(
        self,
        per_minute: float,
        *,
        burst: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._cost = 60.0 / per_minute
        self._burst = burst
        self._clock = clock
        self._sleep = sleep
        self._refilled_at = -float("inf")

    async def take(self, units: float = 1.0) -> None:
        """Wait until the bucket is refilled, then take units; a cancelled wait returns them."""
        now = self._clock()
        start = max(now - self._burst, self._refilled_at)
        self._refilled_at = start + units * self._cost
        if start > now:
            try:
                await self._sleep(start - now)
            except BaseException:
                self.give_back(units)
                raise

    def give_back(self, units: float) -> None:
        """Return units that were not needed; a negative number takes more without waiting."""
        self._refilled_at -= units * self._cost
