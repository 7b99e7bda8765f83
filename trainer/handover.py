"""Turns on devices that the learner shares with engines, and what leaves them meanwhile.

    engines rest and give up memory -> the learner's state comes back -> it works -> its state leaves
    -> new weights take the engines' memory back -> the learner's weights leave -> engines go on

What leaves is what the plan says (`Placement.offload`), or ``devices.offload`` in a single process.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from rollgym.engines import Engine
from rollgym.engines.replicas import ReplicaEngine
from rollgym.errors import EngineLost
from rollgym.trainer.learner import Learner, Metrics

Compute = Callable[..., Awaitable[Any]]


class Handover:
    """Who has the shared devices.

    Args:
        engine: All that generate: one engine, or several as one.
        shared: The numbers of those whose device is trained on.
        learner: Who trains.
        compute: Calls a method of the learner where it is to be called.
        leaves: What of the learner goes to the host's memory while engines work.
        releases: What of the engines is given up while the learner works: ``kv_cache``, ``weights``.
    """

    def __init__(
        self,
        engine: Engine,
        shared: Sequence[int],
        learner: Learner,
        compute: Compute,
        *,
        leaves: Sequence[str] = (),
        releases: Sequence[str] = (),
    ) -> None:
        self._engine, self._shared = engine, tuple(shared)
        self._learner, self._compute = learner, compute
        self._leaves, self._releases = tuple(leaves), tuple(releases)
        self._resting = False
        self.moved: Metrics = {}
        """Of the step under way: bytes that were moved, and how long that took."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Engines on devices that are trained on rest; others play on."""
        self.moved = {}
        await self._rest()
        if self._leaves:
            await self._count("reloaded", self._learner.reload)
        try:
            yield
        except BaseException:
            if "weights" not in self._releases:  # what has none is started anew, or closed
                await self.wake()
            raise
        if "weights" not in self._releases:
            await self._leave()
            await self.wake()
        else:
            await self._leave(but="weights")  # these the engines are to have first

    @asynccontextmanager
    async def renewing(self) -> AsyncIterator[None]:
        """While new weights go to the engines, which work again afterwards."""
        yield
        if self._resting:
            await self._leave()
            await self.wake()

    async def wake(self) -> None:
        """Have the engines go on."""
        began = time.perf_counter()
        for number in self._shared:
            if isinstance(self._engine, ReplicaEngine):
                await self._engine.restore(number)
            else:
                await self._engine.resume()
        self._resting = False
        self._spent(began)

    async def _rest(self) -> None:
        began = time.perf_counter()
        self._resting = bool(self._shared)
        for number in self._shared:
            engine: Any = self._engine
            if isinstance(self._engine, ReplicaEngine):
                await self._engine.suspend(number)
                engine = self._engine.engines[number]
            else:
                await self._engine.pause()
            if self._releases:
                with suppress(EngineLost):  # nothing to give up; others may be left
                    self._add("released", await engine.release(weights="weights" in self._releases))
        self._spent(began)

    async def _leave(self, but: str = "") -> None:
        """Have the learner's state leave; its gradients are dropped, whatever else stays."""
        parts = [part for part in self._leaves if part != but]
        await self._count("offloaded", self._learner.offload, parts)

    async def _count(self, name: str, work: Callable[..., Mapping[str, int]], *args: Any) -> None:
        began = time.perf_counter()
        moved: Mapping[str, int] = await self._compute(work, *args)
        if self._leaves:
            self._add(name, sum(moved.values()))
        self._spent(began)

    def _add(self, name: str, size: float) -> None:
        key = f"handover_{name}"
        self.moved[key] = self.moved.get(key, 0.0) + size

    def _spent(self, began: float) -> None:
        if self._leaves or self._releases:
            self._add("seconds", time.perf_counter() - began)
