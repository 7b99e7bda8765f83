"""Evaluation episodes beside training: fixed specs under one policy version, excluded from training."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, EpisodeSpec
from rollgym.rollout.retry import RetryBudget, RetryPolicy


class EvalQueue:
    """The current evaluation, if any. Weight updates and evaluations exclude each other.

    Each episode has its own retry budget; a retry keeps the episode's id and goes first.
    """

    def __init__(self, retry: RetryPolicy) -> None:
        self._budgets: defaultdict[str, RetryBudget] = defaultdict(lambda: RetryBudget(retry))
        self._held = False
        self._free = asyncio.Event()
        self._queue: deque[EpisodeSpec] = deque()
        self._running: set[str] = set()
        self._finished: dict[str, Episode] = {}
        self._closed = self._cancelled = False
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold the lock for one evaluation or one weight update; never blocks once the run is over."""
        while self._held and not self._closed:
            await self._free.wait()
        self._held = True
        self._free.clear()
        try:
            yield
        finally:
            self._held = False
            self._free.set()

    async def run(
        self, specs: Sequence[EpisodeSpec], fill: Callable[[], None], cancel: Callable[[str], object]
    ) -> list[Episode]:
        """Run these episodes and return them in the given order.

        Waits for: the lock, the last cancelled evaluation, then its own episodes. Unblocked by: `finish`, or
        `close`. If the call is cancelled, ``cancel`` is called for every running episode.
        """
        ids = [f"eval-{spec.episode_id}" for spec in specs]
        if len(set(ids)) != len(ids):
            raise UsageError("An evaluation got the same episode_id twice; ids must be unique.")
        async with self.exclusive():
            # A cancelled evaluation may still have episodes that are ending.
            await self._idle.wait()
            self._finished = {}
            self._budgets.clear()
            self._cancelled = False
            self._queue.extend([] if self._closed else map(_renamed, specs))
            self._update_idle()
            fill()
            try:
                await self._idle.wait()
            except asyncio.CancelledError:
                self._cancel(cancel)
                raise
            return [self._finished[episode_id] for episode_id in ids if episode_id in self._finished]

    def next(self, share: float) -> EpisodeSpec | None:
        """The next episode to start, while evaluation runs fewer than ``share`` episodes."""
        if not self._queue or len(self._running) >= max(1, int(share)):
            return None
        spec = self._queue.popleft()
        self._running.add(spec.episode_id)
        return spec

    def holds(self, spec: EpisodeSpec) -> bool:
        """Whether a started episode belongs to the current evaluation."""
        return spec.episode_id in self._running

    def finish(self, episode: Episode) -> bool:
        """Take in a finished episode; returns whether it is retried instead."""
        episode_id = episode.spec.episode_id
        self._running.remove(episode_id)
        if not self._closed and not self._cancelled and self._budgets[episode_id].spend(episode) is not None:
            self._queue.appendleft(episode.spec)
            return True
        self._finished[episode_id] = episode
        self._update_idle()
        return False

    def close(self) -> None:
        """Run nothing more: waiting callers get the episodes that have finished."""
        self._closed = True
        self._queue.clear()
        self._idle.set()
        self._free.set()

    def _cancel(self, cancel: Callable[[str], object]) -> None:
        self._cancelled = True
        self._queue.clear()
        for episode_id in self._running:
            cancel(episode_id)
        self._update_idle()

    def _update_idle(self) -> None:
        if self._closed or not (self._queue or self._running):
            self._idle.set()
        else:
            self._idle.clear()


def _renamed(spec: EpisodeSpec) -> EpisodeSpec:
    return replace(spec, episode_id=f"eval-{spec.episode_id}")
