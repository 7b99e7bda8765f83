"""The tasks of a run: those that it trains on, those that are held out, and the results on the latter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.core.errors import UsageError
from rollgym.core.seeding import derive_seed
from rollgym.core.types import Episode
from rollgym.evaluation.metrics import summarize
from rollgym.evaluation.plan import Plan, Request, cast_roles, first_role_of, look_at, plan
from rollgym.rollout.task_sampler import EnvSource, TaskSampler
from rollgym.trainer.config import POLICY, EnvConfig, TrainConfig, role_players


def held_out(config: TrainConfig, env: EnvConfig) -> Plan:
    """The held-out episodes of one environment: the same at every step, for every seed of a run."""
    request = Request(
        env_id=env.id,
        agent="lm",
        episodes=config.evaluation.episodes,
        seed=config.evaluation.seed,
        split=config.evaluation.split,
        env_kwargs=env.kwargs,
        limits=env.limits,
    )
    return plan(request)


def make_task_sampler(
    config: TrainConfig,
    envs: Sequence[EnvConfig],
    stage: int,
    reweighed: Sequence[tuple[int, Sequence[float]]] = (),
) -> TaskSampler:
    """The training tasks, in an order that depends on the seed and on changes of the weights alone."""
    # `envs` are the first ones of the config.
    sources = [_env_source(env, config, players) for env, players in zip(envs, role_players(config))]  # noqa: B905
    return TaskSampler(sources, seed=derive_seed("tasks", config.seed, stage), reweighed=reweighed)


def _env_source(env: EnvConfig, config: TrainConfig, others: Mapping[str, str]) -> EnvSource:
    facts = look_at(env.id, env.train_kwargs, env.limits)
    tasks = facts.tasks
    players = cast_roles(env.id, facts.roles, others, POLICY)
    # Without players the policy has all roles.
    roles = [role for role in facts.roles if players.get(role, POLICY) == POLICY]
    if (config.rewards or env.rewards) and len(roles) > 1:
        raise UsageError(
            f"rewards requires one role of {env.id} with the player `policy`, not {len(roles)} "
            f"({', '.join(roles)}): give the other roles to agents or to `past` in envs.roles, or remove "
            "rewards."
        )
    if config.program is not None and facts.roles:
        raise UsageError(
            f"program cannot play all roles of {env.id} (others=null): remove `others` from its kwargs, and "
            "scripted players have the other roles."
        )
    if tasks is not None and config.rollout.groups > tasks.size(env.split):
        raise UsageError(
            f"rollout.groups is {config.rollout.groups}, but the split {env.split!r} of {env.id} has only "
            f"{tasks.size(env.split)} tasks: a batch would hold some of them twice. Lower rollout.groups."
        )
    return EnvSource(
        env_id=env.id,
        env_kwargs=env.train_kwargs,
        env_version=facts.version,
        tasks=tasks,
        split=env.split,
        weight=env.weight,
        limits=facts.limits,
        role=first_role_of(players, POLICY),
        players=players,
    )


def evaluation_summary(tasks: Plan, episodes: Sequence[Episode]) -> dict[str, Any]:
    """The result of an evaluation, as a line of ``evaluations.jsonl`` has it."""
    summary = summarize(tasks.manifest, episodes)
    names = (
        "success_rate", "success_ci", "mean_return", "return_ci", "episodes", "failed", "excluded",
        "many_excluded", "success_all", "outcomes", "length", "valid_actions", "split", "seed", "task_set",
        "content_hash",
    )  # fmt: skip
    return {name: summary[name] for name in names}


def domain_success(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Held-out success of each domain, the mean over its environments, first and last."""
    by_step: dict[str, dict[tuple[int, str], list[float]]] = {}
    for line in evaluations:
        if line.get("domain") and line.get("success_rate") is not None:
            steps = by_step.setdefault(line["domain"], {})
            steps.setdefault((line["step"], line["phase"]), []).append(line["success_rate"])
    return {
        domain: {
            name: round(sum(rates) / len(rates), 4)
            for name, rates in (("first", next(iter(steps.values()))), ("last", list(steps.values())[-1]))
        }
        for domain, steps in by_step.items()
    }
