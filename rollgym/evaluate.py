"""Evaluation: the same episodes for everybody, written as they end, summed up with intervals.

`plan` turns a request into episode specs, which depend on nothing but the request; `run` plays those that
are not done yet.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rollgym.agent import Agent, AgentSetup, make_agent
from rollgym.errors import RunError, UsageError
from rollgym.pool import EnvPool
from rollgym.pool.inline import InlinePool
from rollgym.pool.local import LocalPool
from rollgym.records import jsonable
from rollgym.registry import find_spec, import_module, make
from rollgym.scheduler.episode import play_episode
from rollgym.seeding import derive_seed
from rollgym.store import RunFolder
from rollgym.summary import summarise
from rollgym.tasks import TaskSet
from rollgym.text import text_face
from rollgym.types import SCHEMA_VERSION, Episode, EpisodeSpec, Limits, Outcome
from rollgym.versions import package_versions

IDENTITY = ("env", "agent", "split", "seed", "per_task", "limits", "task_set")
"""Manifest fields that must agree before results may be continued."""
GIVE_UP_AFTER = 10
"""When this many episodes have ended and every one of them failed, the rest would too."""
ATTEMPTS = 3
"""How often an episode is started anew when its worker dies."""
TURN_LIMIT = 2_000
"""For environments that register no limit of their own, so that an evaluation always ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to evaluate."""

    env_id: str
    agent: str
    episodes: int = 100
    seed: int = 0
    split: str = "test"
    per_task: int = 1
    """Episodes that share a task, for pass@k."""
    workers: int = 0
    """Worker processes; 0 plays in this one."""
    concurrency: int = 0
    """Episodes in flight; 0 chooses."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    agent_options: Mapping[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name, least in (
            ("episodes", 1),
            ("per_task", 1),
            ("workers", 0),
            ("concurrency", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {value}.")
        if self.episodes % self.per_task:
            raise UsageError(
                f"--episodes {self.episodes} is not a multiple of --per-task {self.per_task}: every task is "
                "played equally often."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The episodes of a request, and what the manifest says of them."""

    request: Request
    specs: tuple[EpisodeSpec, ...]
    manifest: dict[str, Any]


def plan(request: Request) -> Plan:
    """The episodes to play. The same request gives the same specs on every machine."""
    for module in request.modules:
        import_module(module)
    env = make(request.env_id, **request.env_kwargs)
    try:
        face = text_face(env)
        tasks, success_means, reward_range = face.tasks, face.success_means, face.reward_range
    finally:
        env.close()
    split = request.split if tasks is not None else ""
    registered = find_spec(request.env_id)
    if request.limits.turns is None and registered.max_episode_steps is None:
        request = replace(request, limits=replace(request.limits, turns=TURN_LIMIT))
    version = "" if registered.version is None else f"v{registered.version}"
    specs = tuple(_specs(request, tasks, split, version))
    manifest = {
        "schema": SCHEMA_VERSION,
        "kind": "eval",
        "env": {"id": request.env_id, "version": specs[0].env_version, "kwargs": dict(request.env_kwargs)},
        "agent": {"name": request.agent, "options": dict(request.agent_options)},
        "split": split,
        "seed": request.seed,
        "episodes": request.episodes,
        "per_task": request.per_task,
        "limits": asdict(request.limits),
        "task_set": _describe_tasks(tasks, split),
        "success_means": success_means,
        "reward_range": [_finite(value) for value in reward_range],
        "versions": package_versions(request.env_id),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return Plan(request=request, specs=specs, manifest=manifest)


def _specs(request: Request, tasks: TaskSet | None, split: str, version: str) -> Iterable[EpisodeSpec]:
    wanted = request.episodes // request.per_task
    indices: list[int | None] = [None] * wanted
    if tasks is not None:
        size = tasks.size(split)
        if wanted > size:
            raise UsageError(
                f"Split {split!r} of {request.env_id} has {size} tasks, too few for {request.episodes} "
                f"episodes with {request.per_task} per task: lower --episodes or raise --per-task."
            )
        indices = list(itertools.islice(tasks.order(split, request.seed), wanted))
    for place, task in enumerate(indices):
        group = f"{split or 'seed'}-{place if task is None else task}"
        for member in range(request.per_task):
            yield EpisodeSpec(
                episode_id=f"{group}-{member}",
                env_id=request.env_id,
                env_kwargs=dict(request.env_kwargs),
                env_version=version,
                task=task,
                split=split,
                env_seed=derive_seed("env", request.seed, group),
                sampling_seed=derive_seed("sampling", request.seed, group, member),
                group_id=group,
                member=member,
                limits=request.limits,
            )


def _describe_tasks(tasks: TaskSet | None, split: str) -> dict[str, Any]:
    if tasks is None:
        return {"name": None, "split": split, "size": None, "hash": None}
    return {
        "name": tasks.name,
        "split": split,
        "size": tasks.size(split),
        "hash": tasks.fingerprint(split),
    }


def _finite(value: float) -> float | None:
    return value if abs(value) != float("inf") else None


class Evaluation:
    """Plays a plan's episodes into a folder."""

    def __init__(
        self, plan: Plan, folder: RunFolder, on_episode: Callable[[Episode], None] = lambda episode: None
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.stopped = False
        self.agent_notes: dict[str, Any] = {}
        """What the agent says of itself, where it does: its settings and its totals."""
        self._on_episode = on_episode
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def missing(self) -> list[EpisodeSpec]:
        """The specs that have no episode yet."""
        done = {episode.spec.episode_id for episode in self.folder.done}
        return [spec for spec in self.plan.specs if spec.episode_id not in done]

    async def run(self) -> None:
        """Play what is missing. `stop` ends early; what is finished is kept."""
        request = self.plan.request
        setup = AgentSetup(env_id=request.env_id, env_kwargs=request.env_kwargs)
        agent = make_agent(request.agent, setup, **request.agent_options)
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
        """Ask for an early end: no new episodes, those under way are given up."""
        self.stopped = True
        for task in self._tasks:
            task.cancel()

    async def _play_all(self, pool: EnvPool, agent: Agent) -> None:
        request = self.plan.request
        # A little more than one episode per worker keeps each busy while an answer is on its way.
        lanes = request.concurrency or max(1, 2 * request.workers)
        lost = await self._in_lanes(self.missing, lanes, pool, agent, attempts=1)
        # Second chances are played alone: whatever killed a worker takes nobody else with it.
        for attempt in range(2, ATTEMPTS + 1):
            lost = await self._in_lanes(lost, 1, pool, agent, attempts=attempt)

    async def _in_lanes(
        self, specs: list[EpisodeSpec], lanes: int, pool: EnvPool, agent: Agent, attempts: int
    ) -> list[EpisodeSpec]:
        """Play the episodes and return those that lost their worker and have a chance left."""
        lost: list[EpisodeSpec] = []
        queue = iter(specs)

        async def lane() -> None:
            for spec in queue:
                if self.stopped or (len(lost) >= GIVE_UP_AFTER and not self.folder.done):
                    return
                episode = await play_episode(spec, pool, agent, attempts=attempts)
                if episode.outcome is Outcome.WORKER_LOST and attempts < ATTEMPTS:
                    lost.append(spec)
                else:
                    self._keep(episode)

        self._tasks = [asyncio.create_task(lane()) for _ in range(lanes)]
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        return lost

    def _keep(self, episode: Episode) -> None:
        self.folder.append(episode)
        self._on_episode(episode)
        done = self.folder.done
        if len(done) >= GIVE_UP_AFTER and all(episode.outcome.failed for episode in done):
            self.stop()
            raise RunError(f"All of the first {len(done)} episodes failed: {first_error(done)}")


def evaluate(request: Request, out: Path, *, resume: bool = False) -> dict[str, Any]:
    """Evaluate and return the summary: the whole of ``rollgym eval`` as one call.

    Each episode is in ``out`` as soon as it has ended.
    """
    todo = plan(request)
    check_agent(request)
    folder = open_folder(todo, out, resume)
    evaluation = Evaluation(todo, folder)
    try:
        asyncio.run(evaluation.run())
    finally:
        summary = evaluation.close()
    return summary


def check_agent(request: Request) -> None:
    """Find out that an agent cannot be made, or has options it must not have, before anything is written."""
    setup = AgentSetup(env_id=request.env_id, env_kwargs=request.env_kwargs)
    asyncio.run(make_agent(request.agent, setup, **request.agent_options).close())


def first_error(episodes: Iterable[Episode]) -> str:
    """The message of the first failure, for a sentence."""
    for episode in episodes:
        if episode.error is not None:
            return f"{episode.error.message} ({episode.outcome})"
    return "no message"


def open_folder(plan: Plan, path: Path, resume: bool) -> RunFolder:
    """The folder for a plan's results, new or continued."""
    if resume:
        return RunFolder.resume(path, plan.manifest, IDENTITY)
    return RunFolder.create(path, plan.manifest)
