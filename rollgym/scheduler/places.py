"""The places in flight: which episodes play now, since when they wait, in which lane a trace shows them."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass

from rollgym.scheduler.episode import EpisodeLife, EpisodeState
from rollgym.scheduler.events import EventLog
from rollgym.types import Episode

STOP_SECONDS = 90.0
"""How long episodes may take to end when they are told to; after that they are left to themselves."""


@dataclass(slots=True)
class Live:
    """An episode that plays now."""

    life: EpisodeLife
    task: asyncio.Task[None]
    since: float
    """When it entered its present state."""


class Lanes:
    """Small numbers, lowest first, for things that come and go."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._used = 0

    def take(self) -> int:
        """The lowest number nobody has."""
        if self._free:
            return heapq.heappop(self._free)
        self._used += 1
        return self._used - 1

    def give_back(self, lane: int) -> None:
        """The number is free again."""
        heapq.heappush(self._free, lane)


class Places:
    """As many episodes as may play at once.

    ``emit`` is called once for each, when it has ended and its place is free; ``crashed`` where something
    raised that never should.
    """

    def __init__(
        self,
        limit: int,
        log: EventLog,
        emit: Callable[[Episode], None],
        crashed: Callable[[Exception], None],
    ) -> None:
        self.lives: dict[str, Live] = {}
        self.limit = limit
        self._log = log
        self._emit = emit
        self._crashed = crashed
        self._engine = Lanes()

    @property
    def free(self) -> bool:
        """Whether another episode may start."""
        return len(self.lives) < self.limit

    def start(self, life: EpisodeLife) -> None:
        """Give the episode a place."""
        episode_id = life.spec.episode_id
        if episode_id in self.lives:
            raise AssertionError(f"episode {episode_id} is playing already")
        life.watcher = self._watcher(episode_id)
        self._log.add("started", episode=episode_id, group=life.spec.group_id)
        task = asyncio.create_task(self._live(life))
        self.lives[episode_id] = Live(life, task, self._log.now)

    def cancel(self, episode_id: str) -> bool:
        """End an episode now; False where it does not play."""
        live = self.lives.get(episode_id)
        if live is not None:
            live.life.cancel()
        return live is not None

    async def cancel_all(self) -> None:
        """End everything, and wait until it has ended."""
        lives = list(self.lives.values())
        for live in lives:
            live.life.cancel()
        if lives:
            await asyncio.wait([live.task for live in lives], timeout=STOP_SECONDS)
        for live in lives:
            self._end(live.life, live.life.abandoned)

    async def _live(self, life: EpisodeLife) -> None:
        try:
            episode = await life.live()
        except Exception as error:
            self._crashed(error)
            self._end(life, life.abandoned)
        else:
            self._end(life, lambda: episode)

    def _end(self, life: EpisodeLife, episode: Callable[[], Episode]) -> None:
        """Free the place and emit the episode, unless that was done before."""
        if self.lives.pop(life.spec.episode_id, None) is None:
            return
        try:
            self._emit(episode())
        except Exception as error:
            self._crashed(error)

    def _watcher(self, episode_id: str) -> Callable[[EpisodeState, int, str], None]:
        lane: int | None = None

        def watch(state: EpisodeState, turns: int, worker: str) -> None:
            nonlocal lane
            if lane is not None:
                self._engine.give_back(lane)
                lane = None
            if episode_id not in self.lives:
                return
            self.lives[episode_id].since = self._log.now
            if state is EpisodeState.GENERATING:
                lane = self._engine.take()
            try:
                self._log.add(
                    "state", episode=episode_id, state=state.value, turn=turns, worker=worker, engine=lane
                )
            except Exception as error:
                # A full disk ends the run, but in order: the episode still gives everything back.
                self._crashed(error)

        return watch
