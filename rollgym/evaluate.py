"""Evaluation: the same episodes for everybody, written as they end, summed up with intervals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rollgym.agent import Agent, make_agent
from rollgym.errors import RunError, one_line
from rollgym.evalplan import Plan, Request, plan
from rollgym.pool import EnvPool
from rollgym.pool.inline import InlinePool
from rollgym.pool.local import LocalPool
from rollgym.records import jsonable
from rollgym.run_warnings import RunWarning, warnings_of
from rollgym.running import run_to_end
from rollgym.scheduler.episode import EpisodeLife
from rollgym.scheduler.events import EventLog
from rollgym.scheduler.garbage import rare_collections
from rollgym.scheduler.places import Places
from rollgym.store import EVENTS, RunFolder, set_failed_aside
from rollgym.summary import summarise
from rollgym.types import Episode, EpisodeSpec, Outcome

__all__ = ["Evaluation", "Plan", "Request", "check_agent", "evaluate", "first_error", "open_folder", "plan"]

IDENTITY = ("env", "agent", "split", "seed", "per_task", "limits", "task_set")
"""Manifest fields that must agree before results may be continued."""
GIVE_UP_AFTER = 10
"""When this many episodes have ended and every one of them failed, the rest would too."""
WARN_AFTER = 8
"""After this many episodes of an evaluation, what looks wrong is said without waiting for its end."""
ATTEMPTS = 3
"""How often an episode is started anew when its worker dies."""


class Evaluation:
    """Plays a plan's episodes into a folder."""

    def __init__(
        self, plan: Plan, folder: RunFolder, on_episode: Callable[[Episode], None] = lambda episode: None
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.stopped = False
        self.exit_code = 0
        """130 or 143 where a signal ended it early."""
        self.agent_notes: dict[str, Any] = {}
        """What the agent says of itself, where it does: its settings and its totals."""
        self.warned: set[str] = set()
        """Names of the warnings that were given while it ran."""
        self.on_warning: Callable[[RunWarning], object] = lambda warning: None
        self._on_episode = on_episode
        self._places: Places | None = None
        self._failure: RunError | None = None

    @property
    def missing(self) -> list[EpisodeSpec]:
        """The specs that have no episode yet."""
        done = {episode.spec.episode_id for episode in self.folder.done}
        return [spec for spec in self.plan.specs if spec.episode_id not in done]

    async def run(self) -> None:
        """Play what is missing. `stop` ends early; what is finished is kept."""
        request = self.plan.request
        agent = make_agent(request.agent, request.setup, **request.agent_options)
        pool: EnvPool = (
            LocalPool(request.workers, modules=request.modules)
            if request.workers
            else InlinePool(request.modules)
        )
        try:
            await self._play_all(pool, agent)
        finally:
            await pool.close()
            await agent.close()
            for name in ("describe", "totals"):
                say = getattr(agent, name, None)
                if callable(say):
                    self.agent_notes[name] = jsonable(say(), f"agent.{name}()", lenient=True)

    def close(self) -> dict[str, Any]:
        """Sum up what is there, write the summary and let the folder go."""
        try:
            summary = summarise(self.plan.manifest, self.folder.done)
            summary |= {"agent_notes": self.agent_notes, "out": str(self.folder.path)}
            self.folder.finish(summary)
        finally:
            self.folder.close()
        return summary

    def stop(self) -> None:
        """Ask for an early end: no new episodes, those under way are given up and not kept."""
        self.stopped = True
        if self._places is not None:
            for episode_id in list(self._places.lives):
                self._places.cancel(episode_id)

    async def _play_all(self, pool: EnvPool, agent: Agent) -> None:
        request = self.plan.request
        # A little more than one episode per worker keeps each busy while an answer is on its way.
        lanes = request.concurrency or max(getattr(agent, "lanes", 1), 2 * request.workers)
        with EventLog(self.folder.path / EVENTS) as log:
            lost = await self._play_some(self.missing, lanes, log, pool, agent, attempts=1)
            # Second chances are played alone: whatever killed a worker takes nobody else with it.
            for attempt in range(2, ATTEMPTS + 1):
                lost = await self._play_some(lost, 1, log, pool, agent, attempts=attempt)

    async def _play_some(
        self, specs: list[EpisodeSpec], lanes: int, log: EventLog, pool: EnvPool, agent: Agent, attempts: int
    ) -> list[EpisodeSpec]:
        """Play the episodes and return those that lost their worker and have a chance left."""
        lost: list[EpisodeSpec] = []
        queue = iter(specs)
        over = asyncio.Event()

        def fill() -> None:
            hopeless = len(lost) >= GIVE_UP_AFTER and not self.folder.done
            while places.free and not self.stopped and not hopeless:
                spec = next(queue, None)
                if spec is None:
                    break
                places.start(EpisodeLife(spec, pool, agent, attempts=attempts))
            if not places.lives:
                over.set()

        def emit(episode: Episode) -> None:
            log.add("emitted", episode=episode.spec.episode_id, outcome=episode.outcome.value)
            try:
                if episode.outcome is Outcome.WORKER_LOST and attempts < ATTEMPTS:
                    lost.append(episode.spec)
                elif episode.outcome is not Outcome.CANCELLED:
                    self._keep(episode)
            finally:
                fill()

        places = self._places = Places(lanes, log, emit, self._crash)
        fill()
        try:
            with rare_collections():
                await over.wait()
        finally:
            await places.cancel_all()
        if self._failure is not None:
            raise self._failure
        return lost

    def _crash(self, error: Exception) -> None:
        """Something went wrong that is nobody's outcome (a full disk, say): end, and keep what is there."""
        self._failure = self._failure or RunError(f"the evaluation had to end: {one_line(error)}")
        self.stop()

    def _keep(self, episode: Episode) -> None:
        self.folder.append(episode)
        self._on_episode(episode)
        done = self.folder.done
        if len(done) == WARN_AFTER:
            for warning in warnings_of(done):
                if warning.name == "all_failed":
                    continue  # if that goes on, the evaluation ends with the error
                self.warned.add(warning.name)
                self.on_warning(warning)
        if len(done) >= GIVE_UP_AFTER and all(episode.outcome.failed for episode in done):
            self._failure = RunError(f"All of the first {len(done)} episodes failed: {first_error(done)}")
            self.stop()


def evaluate(
    request: Request, out: Path, *, resume: bool = False, keep_failed: bool = False
) -> dict[str, Any]:
    """Evaluate and return the summary: the whole of ``rollgym eval`` as one call.

    Each episode is in ``out`` as soon as it has ended.
    """
    todo = plan(request)
    check_agent(request)
    folder = open_folder(todo, out, resume, keep_failed=keep_failed)
    evaluation = Evaluation(todo, folder)
    try:
        run_to_end(evaluation.run, evaluation.stop)
    finally:
        summary = evaluation.close()
    return summary


def check_agent(request: Request) -> list[str]:
    """Find out that an agent cannot be made, or has options it must not have, before anything is written.

    Returns:
        What the agent says of where its settings came from, a sentence each.
    """
    agent = make_agent(request.agent, request.setup, **request.agent_options)
    run_to_end(agent.close)
    return [str(note) for note in getattr(agent, "notes", ())]


def first_error(episodes: Iterable[Episode]) -> str:
    """The message of the first failure, for a sentence."""
    for episode in episodes:
        if episode.error is not None:
            return f"{episode.error.message} ({episode.outcome})"
    return "no message"


def open_folder(plan: Plan, path: Path, resume: bool, *, keep_failed: bool = True) -> RunFolder:
    """The folder for a plan's results, new or continued; failed episodes are kept, or played again."""
    if resume:
        if not keep_failed:
            RunFolder.check(path, plan.manifest, IDENTITY)
            set_failed_aside(path)
        return RunFolder.resume(path, plan.manifest, IDENTITY)
    return RunFolder.create(path, plan.manifest)
