"""Evaluation plans: episode specs that depend on the request alone."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rollgym.core.agent import Agent, AgentSetup, agent_name
from rollgym.core.env import text_interface
from rollgym.core.errors import UsageError
from rollgym.core.local_objects import is_local, origin_of
from rollgym.core.registry import env_id_of, find_spec, import_module, make
from rollgym.core.seeding import derive_seed
from rollgym.core.tasks import TaskSet
from rollgym.core.types import SCHEMA_VERSION, EpisodeSpec, Limits
from rollgym.utils.command_line import command_line
from rollgym.utils.env_info import package_versions

TURN_LIMIT = 2_000
"""Turn limit for environments that register none, so that an evaluation always ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An evaluation request: environment, agent, number of episodes.

    Example:
        >>> Request(env_id="rollgym/Sokoban-v0", agent="expert", episodes=200, workers=2)
    """

    env_id: str | Callable[..., Any]
    """An id or ``module:Class``; or a class, or a function that returns an environment."""
    agent: str | Agent | Callable[..., Any]
    """A name or ``module:name``; or a class, an instance, or a function of (observation, info)."""
    episodes: int = 100
    seed: int = 0
    split: str = "test"
    per_task: int = 1
    """Episodes that share a task, for pass@k."""
    workers: int = 0
    """Worker processes; 0 runs the environments in this process."""
    concurrency: int = 0
    """Episodes in flight; 0 chooses from the agent and the workers."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    agent_options: Mapping[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    @property
    def env_name(self) -> str:
        """The environment's id in records."""
        return env_id_of(self.env_id)

    @property
    def agent_name(self) -> str:
        """The agent's name in records."""
        return agent_name(self.agent)

    @property
    def setup(self) -> AgentSetup:
        """The argument of the agent's factory."""
        return AgentSetup(env_id=self.env_name, env_kwargs=self.env_kwargs)

    def __post_init__(self) -> None:
        if is_local(self.env_name) and self.workers:
            raise UsageError(
                f"The environment {self.env_name} is not defined at the top of a module that worker "
                "processes can import: put it into a module, or use workers=0."
            )
        _ = self.agent_name  # refuses what cannot be an agent
        for name, least in (
            ("episodes", 1),
            ("per_task", 1),
            ("workers", 0),
            ("concurrency", 0),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {value}.")
        if self.episodes % self.per_task:
            raise UsageError(
                f"--episodes {self.episodes} is not a multiple of --per-task {self.per_task}: every task is "
                "played equally often."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The episodes of a request, and their manifest."""

    request: Request
    specs: tuple[EpisodeSpec, ...]
    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFacts:
    """An environment's tasks, success definition, reward range and version, and its episode limits."""

    tasks: TaskSet | None
    success_means: str
    reward_range: tuple[float, float]
    version: str
    limits: Limits


def look_at(env_id: str, env_kwargs: Mapping[str, Any], limits: Limits) -> EnvFacts:
    """Make an environment and read its properties. Without any turn limit, episodes get `TURN_LIMIT`."""
    env = make(env_id, **env_kwargs)
    try:
        face = text_interface(env)
        tasks, success_means, reward_range = face.tasks, face.success_means, face.reward_range
    finally:
        env.close()
    registered = find_spec(env_id)
    if limits.turns is None and registered.max_episode_steps is None:
        limits = replace(limits, turns=TURN_LIMIT)
    return EnvFacts(
        tasks=tasks,
        success_means=success_means,
        reward_range=reward_range,
        version="" if registered.version is None else f"v{registered.version}",
        limits=limits,
    )


def plan(request: Request) -> Plan:
    """Plan the episodes of a request. The same request gives the same specs on every machine."""
    for module in request.modules:
        import_module(module)
    env = look_at(request.env_name, request.env_kwargs, request.limits)
    request, tasks = replace(request, limits=env.limits), env.tasks
    split = request.split if tasks is not None else ""
    specs = tuple(_specs(request, tasks, split, env.version))
    manifest = {
        "schema": SCHEMA_VERSION,
        "kind": "eval",
        "env": {
            "id": request.env_name,
            "version": specs[0].env_version,
            "kwargs": dict(request.env_kwargs),
            **origin_of(request.env_name),
        },
        "agent": {
            "name": request.agent_name,
            "options": dict(request.agent_options),
            **origin_of(request.agent_name),
        },
        "split": split,
        "seed": request.seed,
        "episodes": request.episodes,
        "per_task": request.per_task,
        "limits": asdict(request.limits),
        "task_set": _describe_tasks(tasks, split),
        "success_means": env.success_means,
        "reward_range": [value if math.isfinite(value) else None for value in env.reward_range],
        "versions": package_versions(request.env_name),
        "command": command_line(),
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
                f"Split {split!r} of {request.env_name} has {size} tasks, too few for {request.episodes} "
                f"episodes with {request.per_task} per task: lower --episodes or raise --per-task."
            )
        indices = list(itertools.islice(tasks.order(split, request.seed), wanted))
    for position, task in enumerate(indices):
        group = f"{split or 'seed'}-{position if task is None else task}"
        for member in range(request.per_task):
            yield EpisodeSpec(
                episode_id=f"{group}-{member}",
                env_id=request.env_name,
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
    return {"name": tasks.name, "split": split, "size": tasks.size(split), "hash": tasks.fingerprint(split)}
