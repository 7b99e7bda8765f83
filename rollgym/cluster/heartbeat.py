"""Heartbeats: detect an actor that hangs although its process and node are alive.

Every actor has a Ray concurrency group for heartbeats: a separate thread answers them, so a long computation
is not mistaken for a hang. An actor that does not answer within the timeout is killed and replaced like one
that died. Time during which this process was suspended does not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from rollgym.cluster.errors import need_ray

TIMEOUT = 120.0
"""Seconds without a heartbeat after which an actor counts as hung."""
MAX_INTERVAL = 10.0
"""Maximum number of seconds between two heartbeats."""
GROUP = "heartbeat"
OPTIONS: dict[str, Any] = {"concurrency_groups": {GROUP: 1}}
"""Options of ``ray.remote`` for actors with heartbeats."""


def interval(timeout: float) -> float:
    """Return the seconds between two heartbeats for a timeout."""
    return min(MAX_INTERVAL, timeout / 4)


def send_heartbeat(actor: Any) -> Any:
    """Request a heartbeat; returns the object reference of the answer."""
    return actor.__ray_ready__.options(concurrency_group=GROUP).remote()


def hung(timeout: float) -> str:
    """Return the reason for killing a hung actor."""
    return f"no heartbeat for {timeout:g} s, killed"


async def until_hung(actor: Any, timeout: float) -> None:
    """Return when an actor has sent no heartbeat for ``timeout`` seconds; raises `RayError` if it died."""
    tick = interval(timeout)
    while True:
        answer = asyncio.ensure_future(send_heartbeat(actor))
        try:
            silent = 0.0
            while not answer.done():
                began = time.monotonic()
                await asyncio.wait([answer], timeout=tick)
                silent += min(time.monotonic() - began, tick)
                if silent >= timeout and not answer.done():
                    return
            answer.result()
        finally:
            answer.cancel()
        await asyncio.sleep(tick)


class Heartbeats:
    """Heartbeats of several actors, for a thread that waits for their results.

    An actor is monitored from its first answer on: before, it may be waiting for resources.
    """

    def __init__(self, actors: Sequence[Any], timeout: float) -> None:
        self._actors = list(actors)
        self._timeout = timeout
        self._silent: dict[int, float] = {}
        self._asked: dict[int, Any] = {}
        self._looked = time.monotonic()

    def heard(self, rank: int) -> None:
        """Record any answer of an actor."""
        self._silent[rank] = 0.0

    def look(self) -> int | None:
        """Return the rank of a hung actor, if any. Must be called every `interval` seconds."""
        ray = need_ray()
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * interval(self._timeout)), now
        for rank, actor in enumerate(self._actors):
            if rank not in self._asked:
                self._asked[rank] = send_heartbeat(actor)
                continue
            answered, _ = ray.wait([self._asked[rank]], timeout=0)
            if answered:  # also if it died, which its calls report
                del self._asked[rank]
                self.heard(rank)
            elif rank in self._silent:
                self._silent[rank] += passed
                if self._silent[rank] >= self._timeout:
                    return rank
        return None
