"""A rate limit that all players of an agent share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class Bucket:
    """A token bucket: so many units a minute, first come first served.

    It is kept as one number, the time when everything taken so far is paid for. A take that finds the
    bucket in debt waits until the debt is paid; it may itself be larger than the bucket.
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
        self._paid_at = -float("inf")

    async def take(self, units: float = 1.0) -> None:
        """Wait for a turn, then go; a cancelled wait gives its units back."""
        now = self._clock()
        start = max(now - self._burst, self._paid_at)
        self._paid_at = start + units * self._cost
        if start > now:
            try:
                await self._sleep(start - now)
            except BaseException:
                self.give_back(units)
                raise

    def give_back(self, units: float) -> None:
        """Return units that were not needed, or with a negative number take more without waiting."""
        self._paid_at -= units * self._cost
