"""The function behind ``rollgym.evaluate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollgym.core.agent import Agent
from rollgym.core.types import Limits
from rollgym.evaluation import runner
from rollgym.evaluation.plan import RoleAgent
from rollgym.evaluation.run_results import RunResults, load_run
from rollgym.io.atomic import new_folder

AgentLike = str | Agent | Callable[..., Any]
Player = AgentLike | tuple[AgentLike, Mapping[str, Any]]
"""An agent, or a pair of an agent and its options."""


def evaluate(
    env: str | Callable[..., Any],
    agent: str | Agent | Callable[..., Any],
    *,
    episodes: int = 100,
    seed: int = 0,
    split: str = "test",
    per_task: int = 1,
    workers: int = 0,
    concurrency: int = 0,
    env_kwargs: Mapping[str, Any] | None = None,
    agent_options: Mapping[str, Any] | None = None,
    roles: Mapping[str, Player] | None = None,
    limits: Limits | None = None,
    modules: Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
) -> RunResults:
    """Play episodes of an agent in an environment and return the results, as ``rollgym eval`` does.

    It also works where an event loop is running, as in a notebook.

    Args:
        env: An id, ``module:Class``, a class, or a function that makes an environment.
        agent: A name, ``module:name``, an `Agent`, a class, or a function of (observation, info).
        episodes: Number of episodes.
        seed: Decides the tasks and all randomness; the same seed plays the same episodes.
        split: Split of the environment's task set.
        per_task: Episodes per task, for pass@k.
        workers: Worker processes; 0 plays in this process.
        concurrency: Episodes in flight; 0 derives it from the agent and the workers.
        env_kwargs: Arguments for the environment.
        agent_options: Options for the agent, such as ``{"model": "runs/demo/final"}``.
        roles: Other agents by role, in an environment with roles: an agent as above, or a pair of one and its
            options. ``agent`` plays the remaining roles, and the results are those of the first of them.
        limits: Limits per episode on turns, tokens and seconds.
        modules: Modules to import first, here and in the workers: they register environments.
        out: Results folder; by default ``runs/<time>-<env>-<agent>``.
        resume: Play only the episodes that ``out`` lacks or that failed.

    Returns:
        The results; ``.summary`` holds the rates with confidence intervals, ``.episodes`` every episode.

    Raises:
        UsageError: An argument is wrong.
        RunError: The first ten episodes all failed, or the results cannot be written.

    Example:
        >>> results = rollgym.evaluate("rollgym/FrozenLake-v0", "random", episodes=20)
        >>> results.summary["success_rate"]
        0.05
    """
    request = runner.Request(
        env_id=env,
        agent=agent,
        episodes=episodes,
        seed=seed,
        split=split,
        per_task=per_task,
        workers=workers,
        concurrency=concurrency,
        env_kwargs=dict(env_kwargs or {}),
        agent_options=dict(agent_options or {}),
        modules=tuple(modules),
        limits=limits or Limits(),
        roles={role: _role_agent(player) for role, player in (roles or {}).items()},
    )
    names = (request.env_name.removeprefix("rollgym/"), request.agent_name)
    folder = new_folder(*names) if out is None else Path(out)
    runner.evaluate(request, folder, resume=resume)
    return load_run(folder)


def _role_agent(player: Player) -> RoleAgent:
    agent, options = player if isinstance(player, tuple) else (player, {})
    return RoleAgent(agent=agent, options=dict(options))
