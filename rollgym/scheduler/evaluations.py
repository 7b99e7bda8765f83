"""Evaluation episodes beside training ones: fixed specs, one version of the weights, no part in training."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from rollgym.errors import UsageError
from rollgym.types import Episode, EpisodeSpec


class Evaluations:
    """The evaluation under way, if any. Its gate is closed to weight updates while episodes play."""

    def __init__(self, max_infra_retries: int = 0) -> None:
        self._max_infra_retries = max_infra_retries
        self._retries: Counter[str] = Counter()
        self._held = False
        self._free = asyncio.Event()
        self._queue: deque[EpisodeSpec] = deque()
        self._playing: set[str] = set()
        self._finished: dict[str, Episode] = {}
        self._closed = self._called_off = False
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def gate(self) -> AsyncIterator[None]:
        """For one at a time: an evaluation or a change of the weights. Once the run is over nobody waits."""
        while self._held and not self._closed:
            await self._free.wait()
        self._held = True
        self._free.clear()
        try:
            yield
        finally:
            self._held = False
            self._free.set()

    async def add(
        self, specs: Sequence[EpisodeSpec], fill: Callable[[], None], cancel: Callable[[str], object]
    ) -> list[Episode]:
        """Play these episodes and return them in the order they were given."""
        ids = [f"eval-{spec.episode_id}" for spec in specs]
        if len(set(ids)) != len(ids):
            raise UsageError("An evaluation holds an episode twice.")
        async with self.gate():
            # One that was called off may still have episodes that are ending.
            await self._idle.wait()
            self._finished = {}
            self._retries.clear()
            self._called_off = False
            self._queue.extend([] if self._closed else map(_renamed, specs))
            self._note_idle()
            fill()
            try:
                await self._idle.wait()
            except asyncio.CancelledError:
                self._call_off(cancel)
                raise
            return [self._finished[episode_id] for episode_id in ids if episode_id in self._finished]

    def next(self, share: float) -> EpisodeSpec | None:
        """The next episode to start, while evaluation has less than its share of the places."""
        if not self._queue or len(self._playing) >= max(1, int(share)):
            return None
        spec = self._queue.popleft()
        self._playing.add(spec.episode_id)
        return spec

    def holds(self, episode: Episode) -> bool:
        """Whether an episode belongs to the evaluation under way."""
        return episode.spec.episode_id in self._playing

    def finish(self, episode: Episode) -> None:
        """Take an episode that ended."""
        self._playing.remove(episode.spec.episode_id)
        self._finished[episode.spec.episode_id] = episode
        self._note_idle()

    def again(self, episode: Episode) -> bool:
        """Play an episode again that was lost with its infrastructure; False where it was lost too often."""
        episode_id = episode.spec.episode_id
        if self._closed or self._called_off or self._retries[episode_id] >= self._max_infra_retries:
            return False
        self._retries[episode_id] += 1
        self._playing.remove(episode_id)
        self._queue.appendleft(episode.spec)
        return True

    def fail_waiting(self) -> None:
        """Nothing more will be played: whoever waits gets what there is."""
        self._closed = True
        self._queue.clear()
        self._idle.set()
        self._free.set()

    def _call_off(self, cancel: Callable[[str], object]) -> None:
        self._called_off = True
        self._queue.clear()
        for episode_id in self._playing:
            cancel(episode_id)
        self._note_idle()

    def _note_idle(self) -> None:
        if self._closed or not (self._queue or self._playing):
            self._idle.set()
        else:
            self._idle.clear()


def _renamed(spec: EpisodeSpec) -> EpisodeSpec:
    return replace(spec, episode_id=f"eval-{spec.episode_id}")
