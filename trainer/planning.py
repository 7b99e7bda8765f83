"""What a training configuration asks of devices: its models, the size of one step, its wishes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollgym.config import find_config, load
from rollgym.devices.detail import DetailedPlan
from rollgym.devices.inventory import find_cluster
from rollgym.devices.job import Job, Workload
from rollgym.devices.models import ModelShape, find_model
from rollgym.devices.planner import make_plan
from rollgym.devices.types import Cluster
from rollgym.errors import UsageError
from rollgym.evalplan import TURN_LIMIT
from rollgym.registry import find_spec, is_registered
from rollgym.trainer.config import EnvChoice, TrainConfig
from rollgym.trainer.model import SIZES

WORDS = 512
"""Tokens of the built-in policy's vocabulary, about: what it really has depends on the environments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What the plan should assume instead of what the configuration says."""

    model: str | None = None
    """The policy: a word such as ``7b``, or a folder."""
    reward_model: str | None = None
    tokens: int | None = None
    """The longest conversation."""
    staleness: int | None = None


def plan_training(
    name: str | None, overrides: Sequence[str], cluster: str | None = None, what_if: WhatIf | None = None
) -> DetailedPlan:
    """The plan for a configuration by name or path, on a cluster (see `find_cluster`)."""
    if name is None:
        raise UsageError(
            "Say which configuration to plan for: a YAML file, or a name from `rollgym config list`."
        )
    config = load(TrainConfig, find_config(name), overrides)
    found = find_cluster(cluster)
    return make_plan(found, job_of(config, found, what_if or WhatIf()), config.devices)


def job_of(config: TrainConfig, cluster: Cluster, what_if: WhatIf) -> Job:
    """The models and the work of a configuration."""
    actor = policy_shape(config, what_if.model)
    learner = config.learner
    on_processors = all(node.kind == "cpu" for node in cluster.nodes)
    dtype = learner.dtype or ("float32" if on_processors else "bfloat16")
    return Job(
        actor=actor,
        critic=actor if learner.critic == "own" else None,
        # With LoRA the reference is the same model without its matrices.
        reference=actor if config.loss.kl_coef and learner.lora is None else None,
        reward=_reward_shape(config, what_if),
        lora_rank=None if learner.lora is None else learner.lora.rank,
        precision="float32" if dtype == "float32" else "mixed",
        work=workload(config, actor, what_if),
    )


def policy_shape(config: TrainConfig, words: str | None = None) -> ModelShape:
    """The sizes of the policy; of the built-in one, those its folder will have, but for the vocabulary."""
    if words is not None:
        return find_model(words)
    if config.model.path is not None:
        if not Path(config.model.path, "config.json").is_file():
            raise UsageError(
                f"model.path {config.model.path} is no model folder here; say how big it is with --model, "
                "such as --model 7b."
            )
        return find_model(config.model.path)
    size = SIZES[config.model.size]
    return ModelShape(
        name=f"built-in {config.model.size}",
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        inner=size.inner,
        vocab=WORDS,
        tied=True,
        context=config.model.context,
    )


def workload(config: TrainConfig, actor: ModelShape, what_if: WhatIf) -> Workload:
    """One step, with episodes as long as they may be."""
    context = what_if.tokens or actor.context
    late_ids = any(name not in sys.modules for name in config.rollout.modules)
    turns = max(_turns(env, late_ids) for env in config.envs)
    # Without a memory each turn is a conversation of its own.
    talks, each = (1, turns) if config.agent.remember else (turns, 1)
    replies = talks * min(max(1, context // 2), each * config.agent.max_tokens)
    rollout, learner = config.rollout, config.learner
    staleness = what_if.staleness
    return Workload(
        episodes=rollout.groups * rollout.group_size,
        in_flight=rollout.max_in_flight,
        prompt_tokens=max(1, talks * context - replies),
        reply_tokens=replies,
        context=context,
        micro_tokens=learner.micro_tokens,
        checkpointing=learner.gradient_checkpointing,
        passes=learner.epochs,
        optimiser_steps=learner.mini_batches,
        rescore=learner.old_logprobs == "recompute",
        staleness=rollout.staleness if staleness is None else staleness,
    )


def _turns(env: EnvChoice, late_ids: bool) -> int:
    # Planning imports nothing: code that only the config names has whatever limit the config gives it.
    module, colon, _ = env.id.partition(":")
    late = not is_registered(env.id) and (module not in sys.modules if colon else late_ids)
    registered = None if late else find_spec(env.id).max_episode_steps
    limits = (env.limits.turns, env.kwargs.get("max_turns"), registered)
    return min((turns for turns in limits if isinstance(turns, int)), default=TURN_LIMIT)


def _reward_shape(config: TrainConfig, what_if: WhatIf) -> ModelShape | None:
    if what_if.reward_model is not None:
        return find_model(what_if.reward_model)
    # A judge without a model of its own asks the policy's engine.
    models = [reward.model for reward in config.rewards if reward.kind == "judge" and reward.model]
    return find_model(models[0]) if models else None
