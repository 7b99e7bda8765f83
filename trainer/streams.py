"""Which tasks a run trains on. Imports no torch, so a mistake in a config is found before that is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from rollgym.errors import UsageError
from rollgym.evalplan import look_at
from rollgym.scheduler.stream import Source, TaskStream
from rollgym.seeding import derive_seed
from rollgym.trainer.config import EnvChoice, TrainConfig


def make_stream(config: TrainConfig, envs: Sequence[EnvChoice], stage: int) -> TaskStream:
    """The tasks to train on, in an order that depends on the seed alone."""
    return TaskStream([_source(env, config) for env in envs], seed=derive_seed("tasks", config.seed, stage))


def _source(env: EnvChoice, config: TrainConfig) -> Source:
    facts = look_at(env.id, env.kwargs, env.limits)
    tasks = facts.tasks
    if tasks is not None and config.rollout.groups > tasks.size(env.split):
        raise UsageError(
            f"rollout.groups is {config.rollout.groups}, but the split {env.split!r} of {env.id} has only "
            f"{tasks.size(env.split)} tasks: a batch would hold some of them twice. Lower rollout.groups."
        )
    return Source(
        env_id=env.id,
        env_kwargs=env.kwargs,
        env_version=facts.version,
        tasks=tasks,
        split=env.split,
        weight=env.weight,
        limits=facts.limits,
    )
