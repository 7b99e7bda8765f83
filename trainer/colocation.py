"""Colocation: engines and the learner take turns on the devices they share.

    engines sleep and release memory -> the learner reloads its state -> it trains -> it offloads its state
    -> new weights go to the engines -> the learner offloads its weights -> engines wake up

The plan decides what is offloaded (`Placement.offload`); in a single process, ``devices.offload`` does.

In an overlapping plan the learner lends its devices: engines on them generate between updates, as those on
other devices do all the time. While they sleep, their sessions continue on the others.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rollgym.engines.base import Engine
from rollgym.trainer.learner.protocol import LearnerProtocol, Metrics

Compute = Callable[..., Awaitable[Any]]


class Colocation:
    """Moves the learner and the engines on and off the devices they share.

    Args:
        engine: One engine, or several behind a `RoutedEngine`.
        shared: Indices of the engines whose devices the learner uses.
        learner: The learner.
        compute: Calls a method of the learner in the learner's thread.
        offloads: Parts of the learner that leave the device while engines generate: optimizer, weights.
        releases: Memory that engines release while the learner trains: kv_cache, weights.
    """

    def __init__(
        self,
        engine: Engine,
        shared: Sequence[int],
        learner: LearnerProtocol,
        compute: Compute,
        *,
        offloads: Sequence[str] = (),
        releases: Sequence[str] = (),
    ) -> None:
        self._engine, self._shared = engine, tuple(shared)
        self._learner, self._compute = learner, compute
        self._offloads, self._releases = tuple(offloads), tuple(releases)
        self._sleeping = False
        self._sampled: tuple[int, ...] = ()
        """`Engine.sampled_tokens` at the last step."""
        self.metrics: Metrics = {}
        """Of the current step: bytes moved, the seconds this took, and the lent engines' share of tokens."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """While the learner trains: engines on its devices sleep, others keep generating."""
        self.metrics = self._lending()
        await self.sleep()
        if self._offloads:
            await self._move("reloaded", self._learner.reload)
        try:
            yield
        except BaseException:
            if "weights" not in self._releases:  # without weights, engines are restarted or closed
                await self.wake_up()
            raise
        if "weights" not in self._releases:
            await self._offload()
            await self.wake_up()
        else:
            await self._offload(keep="weights")  # until the engines have them

    @asynccontextmanager
    async def sync_weights(self) -> AsyncIterator[None]:
        """While the engines receive new weights; they wake up afterwards."""
        yield
        if self._sleeping:
            await self._offload()
            await self.wake_up()

    async def sleep(self) -> None:
        """Pause the shared engines and release their memory."""
        began = time.perf_counter()
        self._sleeping = bool(self._shared)
        if self._shared:
            freed = await self._engine.sleep(self._releases, replicas=self._shared)
            if self._releases:
                self._add("released_bytes", freed)
        self._add_seconds(began)

    async def wake_up(self) -> None:
        """Let the shared engines generate again."""
        began = time.perf_counter()
        if self._shared:
            await self._engine.wake_up(replicas=self._shared)
        self._sleeping = False
        self._add_seconds(began)

    def _lending(self) -> Metrics:
        """Return the share of the tokens since the last step that engines on the learner's devices sampled.

        Only where other engines stay awake: elsewhere the learner's devices are not lent, but shared.
        """
        now = self._engine.sampled_tokens
        before = self._sampled if len(self._sampled) == len(now) else (0,) * len(now)
        self._sampled = now
        fresh = [later - earlier for earlier, later in zip(before, now, strict=True)]
        if not 0 < len(self._shared) < len(now) or sum(fresh) <= 0:
            return {}
        return {"lent_tokens_frac": sum(fresh[number] for number in self._shared) / sum(fresh)}

    async def _offload(self, keep: str = "") -> None:
        """Offload the learner, except ``keep``; its gradients are dropped in any case."""
        parts = [part for part in self._offloads if part != keep]
        await self._move("offloaded", self._learner.offload, parts)

    async def _move(self, name: str, work: Callable[..., Mapping[str, int]], *args: Any) -> None:
        began = time.perf_counter()
        moved: Mapping[str, int] = await self._compute(work, *args)
        if self._offloads:
            self._add(f"{name}_bytes", sum(moved.values()))
        self._add_seconds(began)

    def _add(self, name: str, value: float) -> None:
        key = f"colocation_{name}"
        self.metrics[key] = self.metrics.get(key, 0.0) + value

    def _add_seconds(self, began: float) -> None:
        if self._offloads or self._releases:
            self._add("seconds", time.perf_counter() - began)
