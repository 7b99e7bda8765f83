"""Evaluation plans: episode specs that depend on the request alone."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rollgym.core.agent import Agent, AgentSetup, agent_name, make_agent
from rollgym.core.env import text_interface
from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.local_objects import is_local, origin_of
from rollgym.core.registry import env_id_of, find_spec, import_module, make
from rollgym.core.role_env import ALL_ROLES, roles_of
from rollgym.core.roles import TeamAgent
from rollgym.core.seeding import derive_seed
from rollgym.core.tasks import TaskSet
from rollgym.core.types import SCHEMA_VERSION, EpisodeSpec, Limits
from rollgym.utils.command_line import command_line
from rollgym.utils.env_info import package_versions

TURN_LIMIT = 2_000
"""Turn limit for environments that register none, so that an evaluation always ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAgent:
    """The agent of one role.

    Example:
        >>> RoleAgent(agent="lm", options={"model": "runs/demo/final"})
    """

    agent: str | Agent | Callable[..., Any]
    """As in `Request`."""
    options: Mapping[str, Any] = field(default_factory=dict)


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
    roles: Mapping[str, RoleAgent] = field(default_factory=dict)
    """Other agents, by the role that they play; ``agent`` plays the remaining roles. The results are those of
    the first of these."""

    @property
    def env_name(self) -> str:
        """The environment's id in records."""
        return env_id_of(self.env_id)

    @property
    def agent_name(self) -> str:
        """The agent's name in records."""
        return agent_name(self.agent)

    @property
    def role_labels(self) -> dict[str, str]:
        """The name in records of each agent in ``roles``: unique, unlike the names of agents."""
        names = {role: agent_name(player.agent) for role, player in self.roles.items()}
        known = [self.agent_name, *names.values()]
        return {role: name if known.count(name) == 1 else f"{name} ({role})" for role, name in names.items()}

    def make_agent(self) -> Agent:
        """Make the agent; with ``roles``, a team."""
        agent = make_agent(self.agent, self.setup, **self.agent_options)
        if not self.roles:
            return agent
        return TeamAgent({self.agent_name: agent, **self.make_team().agents}, default=self.agent_name)

    def make_team(self) -> TeamAgent:
        """Make the agents in ``roles`` alone."""
        labels = self.role_labels
        agents = {
            labels[role]: make_agent(player.agent, self.setup, **player.options)
            for role, player in self.roles.items()
        }
        return TeamAgent(agents, default=next(iter(agents)))

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
        if self.roles:
            object.__setattr__(self, "env_kwargs", {**self.env_kwargs, **ALL_ROLES})
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
    roles: tuple[str, ...] = ()
    """Names of the roles that agents play; empty where one agent plays the episode."""


def look_at(env_id: str, env_kwargs: Mapping[str, Any], limits: Limits) -> EnvFacts:
    """Make an environment and read its properties. Without any turn limit, episodes get `TURN_LIMIT`."""
    try:
        env = make(env_id, **env_kwargs)
    except UsageError as error:
        if env_kwargs.get("others", "") is None and "'others'" in str(error):
            raise UsageError(f"{env_id} has no roles: one agent plays it.") from error
        raise
    try:
        face = text_interface(env)
        tasks, success_means, reward_range = face.tasks, face.success_means, face.reward_range
        roles = tuple(role.name for role in roles_of(face))
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
        roles=roles,
    )


def plan(request: Request) -> Plan:
    """Plan the episodes of a request. The same request gives the same specs on every machine."""
    for module in request.modules:
        import_module(module)
    env = look_at(request.env_name, request.env_kwargs, request.limits)
    request, tasks = replace(request, limits=env.limits), env.tasks
    split = request.split if tasks is not None else ""
    players = cast_roles(request.env_name, env.roles, request.role_labels, request.agent_name)
    specs = tuple(_specs(request, tasks, split, env.version, players))
    roles = {
        role: {"name": agent_name(player.agent), "options": dict(player.options)}
        for role, player in request.roles.items()
    }
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
            **({"roles": roles} if roles else {}),
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


def cast_roles(env_id: str, roles: Sequence[str], others: Mapping[str, str], agent: str) -> dict[str, str]:
    """Return the player of each role: those of ``others``, and ``agent`` in the remaining roles.

    Raises:
        UsageError: The environment has no such role, or no role remains.
    """
    for role in others:
        if not roles:
            raise UsageError(f"{env_id} has no roles: one agent plays it.")
        if role not in roles:
            raise UnknownName(f"role of {env_id}", role, roles, f"Roles: {', '.join(roles)}.")
    players = {role: others.get(role, agent) for role in roles} if others else {}
    if players and agent not in players.values():
        raise UsageError(
            f"Every role of {env_id} is given to another agent, so agent {agent!r} plays none: leave one out."
        )
    return players


def first_role_of(players: Mapping[str, str], agent: str) -> str:
    """Return the first role of an agent: its reward and success are those of the episode."""
    return next((role for role, player in players.items() if player == agent), "")


def _specs(
    request: Request, tasks: TaskSet | None, split: str, version: str, players: Mapping[str, str]
) -> Iterable[EpisodeSpec]:
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
                role=first_role_of(players, request.agent_name),
                players=dict(players),
            )


def _describe_tasks(tasks: TaskSet | None, split: str) -> dict[str, Any]:
    if tasks is None:
        return {"name": None, "split": split, "size": None, "hash": None}
    return {"name": tasks.name, "split": split, "size": tasks.size(split), "hash": tasks.fingerprint(split)}
