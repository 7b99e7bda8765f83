"""Bounded concurrency: the episodes in flight, and the runner of a fixed list of episodes.

`InFlight` runs all episodes of rollgym. The scheduler feeds it from the group buffer and the evaluation
queue; `EpisodeBatch` feeds it from a list (``rollgym eval``, suites, demonstrations, the built-in policy's
corpus). Both apply `rollgym.rollout.retry`.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollgym.core.agent import Agent
from rollgym.core.types import Episode, EpisodeSpec, Outcome
from rollgym.pool.base import EnvPool
from rollgym.rollout.episode_runner import EpisodeRunner, EpisodeState
from rollgym.rollout.events import EventLog
from rollgym.rollout.gc_tuning import rare_collections
from rollgym.rollout.retry import NO_RETRIES, RetryBudget, RetryPolicy

STOP_SECONDS = 90.0
"""Seconds that cancelled episodes may take to end; after that they are abandoned."""


@dataclass(slots=True)
class RunningEpisode:
    """An episode in flight."""

    runner: EpisodeRunner
    task: asyncio.Task[None]
    since: float
    """Log time at which it entered its current state."""


class TraceLanes:
    """Allocator of small numbers, lowest first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._used = 0

    def take(self) -> int:
        """Allocate the lowest free number."""
        if self._free:
            return heapq.heappop(self._free)
        self._used += 1
        return self._used - 1

    def give_back(self, lane: int) -> None:
        """Free a number."""
        heapq.heappush(self._free, lane)


class InFlight:
    """Runs at most ``limit`` episodes at once.

    Args:
        limit: Episodes that run at once.
        log: Receives ``episode_started``, ``episode_state`` and ``episode_finished`` events.
        next_runner: Returns the next episode to start, or ``None`` if none can start now.
        on_finished: Called once per episode, after it has ended and its slot is free.
        on_crash: Called with exceptions that are not an outcome of an episode.
        on_generating: Called when an episode begins its first turn.
    """

    def __init__(
        self,
        limit: int,
        log: EventLog,
        next_runner: Callable[[], EpisodeRunner | None],
        on_finished: Callable[[Episode], None],
        on_crash: Callable[[Exception], None],
        on_generating: Callable[[EpisodeSpec], None] = lambda spec: None,
    ) -> None:
        self.running: dict[str, RunningEpisode] = {}
        self.limit = limit
        self._log = log
        self._next_runner = next_runner
        self._on_finished = on_finished
        self._on_crash = on_crash
        self._on_generating = on_generating
        self._engine_slots = TraceLanes()

    def fill(self) -> None:
        """Start episodes until all slots are in use or none can start."""
        try:
            while len(self.running) < self.limit:
                runner = self._next_runner()
                if runner is None:
                    return
                self._start(runner)
        except Exception as error:
            self._on_crash(error)

    def cancel(self, episode_id: str) -> bool:
        """Cancel an episode; returns whether it was running."""
        running = self.running.get(episode_id)
        if running is not None:
            running.runner.cancel()
        return running is not None

    async def cancel_all(self) -> None:
        """Cancel all episodes.

        Waits for: every episode to end. Unblocked by: the last of them, or `STOP_SECONDS`.
        """
        before = list(self.running.values())
        for running in before:
            running.runner.cancel()
        if before:
            await asyncio.wait([running.task for running in before], timeout=STOP_SECONDS)
        for running in before:
            self._finish(running.runner, running.runner.abandoned)

    def _start(self, runner: EpisodeRunner) -> None:
        episode_id = runner.spec.episode_id
        if episode_id in self.running:
            raise AssertionError(f"episode {episode_id} is already running")
        runner.on_state = self._state_logger(episode_id)
        self._log.add("episode_started", episode=episode_id, group=runner.spec.group_id)
        task = asyncio.create_task(self._run(runner))
        self.running[episode_id] = RunningEpisode(runner, task, self._log.now)

    async def _run(self, runner: EpisodeRunner) -> None:
        try:
            episode = await runner.run()
        except Exception as error:
            self._on_crash(error)
            self._finish(runner, runner.abandoned)
        else:
            self._finish(runner, lambda: episode)

    def _finish(self, runner: EpisodeRunner, result: Callable[[], Episode]) -> None:
        """Free the slot and report the episode, unless that was done before."""
        if self.running.pop(runner.spec.episode_id, None) is None:
            return
        try:
            episode = result()
            spec, outcome = episode.spec, episode.outcome.value
            self._log.add("episode_finished", episode=spec.episode_id, group=spec.group_id, outcome=outcome)
            self._on_finished(episode)
        except Exception as error:
            self._on_crash(error)

    def _state_logger(self, episode_id: str) -> Callable[[EpisodeState, int, str], None]:
        slot: int | None = None

        def on_state(state: EpisodeState, turns: int, worker: str) -> None:
            nonlocal slot
            if slot is not None:
                self._engine_slots.give_back(slot)
                slot = None
            if episode_id not in self.running:
                return
            self.running[episode_id].since = self._log.now
            if state is EpisodeState.GENERATING:
                slot = self._engine_slots.take()
                if not turns:
                    self._on_generating(self.running[episode_id].runner.spec)
            try:
                self._log.add(
                    "episode_state",
                    episode=episode_id,
                    state=state.value,
                    turn=turns,
                    worker=worker,
                    engine=slot,
                )
            except Exception as error:
                # A full disk ends the run, but in order: the episode still releases its environment.
                self._on_crash(error)

        return on_state


class EpisodeBatch:
    """Runs a fixed list of episodes with bounded concurrency and retries.

    Retries run after all other episodes and one at a time, so that an episode that kills its worker takes no
    other with it. `Episode.attempts` counts them.

    Args:
        pool: Where the environments run.
        agent: Plays all episodes.
        max_in_flight: Episodes that run at once.
        retry: Applied to each episode separately.
        log: Receives the events.
        on_episode: Called with each final episode, in the order in which they end. An exception that it
            raises ends the batch.
        give_up: Called with the number of episodes lost in this round; while it is true, none is started.
    """

    def __init__(
        self,
        pool: EnvPool,
        agent: Agent,
        *,
        max_in_flight: int,
        retry: RetryPolicy = NO_RETRIES,
        log: EventLog | None = None,
        on_episode: Callable[[Episode], object] = lambda episode: None,
        give_up: Callable[[int], bool] = lambda lost: False,
    ) -> None:
        self.stopped = False
        self._pool = pool
        self._agent = agent
        self._max_in_flight = max_in_flight
        self._budgets: defaultdict[str, RetryBudget] = defaultdict(lambda: RetryBudget(retry))
        self._log = log or EventLog()
        self._on_episode = on_episode
        self._give_up = give_up
        self._in_flight: InFlight | None = None
        self._failure: Exception | None = None

    async def run(self, specs: Iterable[EpisodeSpec]) -> None:
        """Run the episodes.

        Waits for: all episodes of a round to end, then those of the next round (the retries). Unblocked by:
        the last of them, `stop`, or an exception of ``on_episode``, which is raised here.
        """
        attempt, limit, waiting = 1, self._max_in_flight, list(specs)
        while waiting:
            waiting = await self._run_round(waiting, limit, attempt)
            attempt, limit = attempt + 1, 1

    def stop(self) -> None:
        """Start no more episodes and cancel those in flight, which are then not reported."""
        self.stopped = True
        if self._in_flight is not None:
            for episode_id in list(self._in_flight.running):
                self._in_flight.cancel(episode_id)

    async def _run_round(self, specs: list[EpisodeSpec], limit: int, attempt: int) -> list[EpisodeSpec]:
        """Run the episodes once; returns those to retry."""
        lost: list[EpisodeSpec] = []
        queue = iter(specs)
        over = asyncio.Event()

        def next_runner() -> EpisodeRunner | None:
            spec = None if self.stopped or self._give_up(len(lost)) else next(queue, None)
            return None if spec is None else EpisodeRunner(spec, self._pool, self._agent, attempts=attempt)

        def refill() -> None:
            in_flight.fill()
            if not in_flight.running:
                over.set()

        def on_finished(episode: Episode) -> None:
            try:
                if self._budgets[episode.spec.episode_id].spend(episode) is not None:
                    lost.append(episode.spec)
                elif episode.outcome is not Outcome.CANCELLED:
                    self._on_episode(episode)
            except Exception as error:
                on_crash(error)
            refill()

        def on_crash(error: Exception) -> None:
            self._failure = self._failure or error
            self.stop()
            if not in_flight.running:
                over.set()

        in_flight = self._in_flight = InFlight(limit, self._log, next_runner, on_finished, on_crash)
        with rare_collections():
            try:
                refill()
                await over.wait()
            except asyncio.CancelledError:
                self.stopped = True  # a finished episode must not start the next one
                raise
            finally:
                await in_flight.cancel_all()
        if self._failure is not None:
            raise self._failure
        return lost


async def run_episodes(
    specs: Iterable[EpisodeSpec],
    pool: EnvPool,
    agent: Agent,
    *,
    max_in_flight: int,
    retry: RetryPolicy = NO_RETRIES,
    on_episode: Callable[[Episode], object] = lambda episode: None,
) -> list[Episode]:
    """Run episodes and return them in the order of ``specs``; see `EpisodeBatch` for the arguments."""
    ordered = list(specs)
    episodes: dict[str, Episode] = {}

    def collect(episode: Episode) -> None:
        on_episode(episode)
        episodes[episode.spec.episode_id] = episode

    batch = EpisodeBatch(pool, agent, max_in_flight=max_in_flight, retry=retry, on_episode=collect)
    await batch.run(ordered)
    return [episodes[spec.episode_id] for spec in ordered]
