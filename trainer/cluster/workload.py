"""The workload of a training config for the device planner: its models and the size of one step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rollgym.config.loader import load
from rollgym.core.errors import UsageError
from rollgym.core.registry import find_spec, is_registered
from rollgym.devices.inventory import find_cluster
from rollgym.devices.models import ModelShape, find_model
from rollgym.devices.planner import make_plan
from rollgym.devices.report import PlanReport
from rollgym.devices.types import Cluster, MeshRequest, Plan
from rollgym.devices.workload import Job, Workload
from rollgym.evaluation.plan import TURN_LIMIT
from rollgym.trainer.builtin_policy.model import SIZES
from rollgym.trainer.config import EnvConfig, TrainConfig
from rollgym.trainer.config_files import find_config
from rollgym.trainer.learner.config import LearnerConfig, ParallelConfig

WORDS = 512
"""Approximate vocabulary size of the built-in policy: the exact size depends on the environments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Values that replace those of the config in a plan."""

    model: str | None = None
    """The policy: a size such as ``7b``, or a model folder."""
    reward_model: str | None = None
    tokens: int | None = None
    """Longest conversation, in tokens."""
    staleness: int | None = None


def plan_training(
    name: str | None, overrides: Sequence[str], cluster: str | None = None, what_if: WhatIf | None = None
) -> PlanReport:
    """Plan a config, by name or path, on a cluster (see `find_cluster`)."""
    config = read_train_config(name, overrides)
    devices = find_cluster(cluster)
    report = make_plan(devices, job_of(config, devices, what_if or WhatIf()), config.devices)
    check_mesh(config, report.plan)
    return report


def check_mesh(config: TrainConfig, plan: Plan) -> None:
    """Raise `UsageError` where the planned training ranks cannot form the mesh of ``learner.parallel``."""
    config.learner.parallel.sizes(len(plan.placements["actor_train"].devices))


def read_train_config(name: str | None, overrides: Sequence[str]) -> TrainConfig:
    """Read a config, by name or path, with overrides."""
    if name is None:
        raise UsageError("No config given: pass a YAML file or a name from `rollgym config list`.")
    return load(TrainConfig, find_config(name), overrides)


def job_of(config: TrainConfig, cluster: Cluster, what_if: WhatIf) -> Job:
    """The models of a config and the work of one step."""
    actor = policy_shape(config, what_if.model)
    learner = config.learner
    on_cpu = all(node.kind == "cpu" for node in cluster.nodes)
    # What `auto` chooses on a CPU is measured at the start: until then the larger one is planned for.
    dtype = learner.dtype if learner.dtype not in (None, "auto") else "float32" if on_cpu else "bfloat16"
    return Job(
        actor=actor,
        critic=actor if learner.critic == "separate" else None,
        # With LoRA the reference is the same model without the adapters.
        reference=actor if config.loss.kl_coef and learner.lora is None else None,
        reward=_reward_shape(config, what_if),
        lora_rank=None if learner.lora is None else learner.lora.rank,
        precision="float32" if dtype == "float32" else "mixed",
        tensor_parallel_engine=config.engine.kind != "embedded",
        mesh=_mesh(learner),
        choose_mesh=learner.strategy == "auto" and not on_cpu,
        choose_context=_shares_rows(learner, actor),
        workload=workload(config, actor, what_if),
    )


def _mesh(learner: LearnerConfig) -> MeshRequest | None:
    """The mesh that is asked for; with ``strategy=auto`` only if it has a dimension."""
    parallel = learner.parallel
    if learner.strategy != "mesh" and (learner.strategy != "auto" or parallel == ParallelConfig()):
        return None
    return MeshRequest(**asdict(parallel))


def _shares_rows(learner: LearnerConfig, actor: ModelShape) -> bool:
    """Whether a plan may choose context parallel ranks: their rows are packed, and routers not replayed."""
    return learner.layout != "padded" and (not actor.experts or learner.router_replay == "off")


def policy_shape(config: TrainConfig, words: str | None = None) -> ModelShape:
    """The dimensions of the policy; for the built-in one exact but for the vocabulary."""
    if words is not None:
        return find_model(words)
    if config.model.path is not None:
        if not Path(config.model.path, "config.json").is_file():
            raise UsageError(
                f"model.path {config.model.path} is not a local model folder: pass the model size, such as "
                "--model 7b."
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
    """One training step with episodes of maximum length."""
    context = what_if.tokens or actor.context
    late_ids = any(name not in sys.modules for name in config.imports)
    turns = max(_turns(env, late_ids) for env in config.envs)
    # Without history each turn is a separate conversation.
    talks, each = (1, turns) if config.agent.history == "full" else (turns, 1)
    replies = talks * min(max(1, context // 2), each * config.agent.max_tokens)
    rollout, learner = config.rollout, config.learner
    staleness = what_if.staleness
    return Workload(
        episodes=rollout.groups * rollout.group_size,
        in_flight=rollout.max_in_flight,
        prompt_tokens=max(1, talks * context - replies),
        reply_tokens=replies,
        context=context,
        max_tokens_per_microbatch=learner.max_tokens_per_microbatch,
        checkpointing=learner.gradient_checkpointing,
        passes=learner.epochs,
        optimizer_steps=learner.mini_batches,
        rescore=learner.old_logprobs == "recompute",
        staleness=rollout.max_staleness if staleness is None else staleness,
    )


def _turns(env: EnvConfig, late_ids: bool) -> int:
    # Planning imports nothing: environments that only the config names get their limit from the config.
    module, colon, _ = env.id.partition(":")
    late = not is_registered(env.id) and (module not in sys.modules if colon else late_ids)
    registered = None if late else find_spec(env.id).max_episode_steps
    limits = (env.limits.turns, env.kwargs.get("max_turns"), registered)
    return min((turns for turns in limits if isinstance(turns, int)), default=TURN_LIMIT)


def _reward_shape(config: TrainConfig, what_if: WhatIf) -> ModelShape | None:
    if what_if.reward_model is not None:
        return find_model(what_if.reward_model)
    # A judge without a separate model uses the policy's engine.
    models = [reward.model for reward in config.rewards if reward.kind == "judge" and reward.model]
    return find_model(models[0]) if models else None
