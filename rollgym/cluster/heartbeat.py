"""Signs of life of actors: how one is found that hangs, although its process and its node are there.

Every actor has a concurrency group of Ray's for this alone: a thread that answers whatever the actor works
on, so that a long step is never taken for a hang. An actor that does not answer for the timeout is killed and
replaced like one that died. Time in which this process itself stood still does not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from rollgym.cluster.errors import need_ray

TIMEOUT = 120.0
"""Seconds without a sign of life after which an actor counts as hung."""
EVERY = 10.0
"""Seconds between two signs of life, at most."""
GROUP = "heartbeat"
OPTIONS: dict[str, Any] = {"concurrency_groups": {GROUP: 1}}
"""For ``ray.remote``: what an actor needs to be watched."""


def interval(timeout: float) -> float:
    """Seconds between two looks at an actor that may be silent for ``timeout``."""
    return min(EVERY, timeout / 4)


def sign(actor: Any) -> Any:
    """Ask an actor for a sign of life; the reference of its answer."""
    return actor.__ray_ready__.options(concurrency_group=GROUP).remote()


def hung(timeout: float) -> str:
    """Why an actor that was silent for so long is gone."""
    return f"it gave no sign of life for {timeout:g} s and was killed"


async def until_hung(actor: Any, timeout: float) -> None:
    """Return when a running actor has been silent for ``timeout`` seconds. `RayError` where it died."""
    tick = interval(timeout)
    while True:
        answer = asyncio.ensure_future(_awaited(sign(actor)))
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


async def _awaited(what: Any) -> Any:
    return await what


class Pulses:
    """The signs of life of several actors, for a thread that waits for their answers.

    Actors are watched from their first answer on: until then they may wait for a place.
    """

    def __init__(self, actors: Sequence[Any], timeout: float) -> None:
        self._actors = list(actors)
        self._timeout = timeout
        self._silent: dict[int, float] = {}
        self._asked: dict[int, Any] = {}
        self._looked = time.monotonic()

    def heard(self, rank: int) -> None:
        """The actor has answered something."""
        self._silent[rank] = 0.0

    def look(self) -> int | None:
        """The rank that has been silent for too long, if there is one; to be called every `interval`."""
        ray = need_ray()
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * interval(self._timeout)), now
        for rank, actor in enumerate(self._actors):
            if rank not in self._asked:
                self._asked[rank] = sign(actor)
                continue
            answered, _ = ray.wait([self._asked[rank]], timeout=0)
            if answered:  # also where it died, which its calls say
                del self._asked[rank]
                self.heard(rank)
            elif rank in self._silent:
                self._silent[rank] += passed
                if self._silent[rank] >= self._timeout:
                    return rank
        return None
