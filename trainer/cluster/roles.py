"""What a plan means for a run on Ray: which learner runs where, and which engines share a device with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rollgym.cluster.placement import ActorSlot, PlacedPlan
from rollgym.devices.types import Plan, Role
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions, ParallelConfig
from rollgym.trainer.learner.multi_role import MultiRoleLearner, policy_config
from rollgym.trainer.learner.protocol import OFFLOADABLE
from rollgym.trainer.learner.ray_learner import RayLearner
from rollgym.trainer.learner.strategies import find_strategy
from rollgym.trainer.losses.settings import LossConfig
from rollgym.trainer.runtime import learner_options

STRATEGIES = {"none": "ddp", "optimizer": "zero1", "gradients": "zero2", "weights": "fsdp2"}
"""The strategy of the training ranks, by `Placement.sharding`."""
ROLES: dict[str, Role] = {"policy": "actor_train", "reference": "reference", "critic": "critic"}


def open_learner(config: TrainConfig, model: Path, placed: PlacedPlan) -> MultiRoleLearner:
    """Start the learner on its devices; reference and critic are part of it or on separate devices."""
    separate = separate_roles(placed)
    options = replace(learner_options(config), keep_reference="reference" not in separate)
    policy = policy_config(config.learner) if "critic" in separate else config.learner
    learners: dict[str, RayLearner] = {}
    try:
        learners["policy"] = _open_role("policy", model, policy, config.loss, options, config, placed)
        if "reference" in separate:
            learners["reference"] = _reference(config, model, placed)
        if "critic" in separate:
            learners["critic"] = _critic(config, model, placed)
    except BaseException:
        for learner in learners.values():
            learner.close()
        raise
    return MultiRoleLearner(**learners, offloads=_offloads_by_role(placed))


def restart_learner(learner: MultiRoleLearner, config: TrainConfig, placed: PlacedPlan) -> None:
    """Restart all ranks on the devices of another plan."""
    learner.offloads = _offloads_by_role(placed)
    roles = ("policy", *separate_roles(placed))
    learner.restart({name: placement(config, placed, name) for name in roles})


def placement(config: TrainConfig, placed: PlacedPlan, name: str) -> dict[str, Any]:
    """Arguments of `RayLearner.restart`, which depend on the plan: strategy, mesh, slots, offloading."""
    role = ROLES[name]
    slots, planned = placed.slots[role], placed.plan.placements[role]
    strategy: str = config.learner.strategy
    if name == "reference" or strategy == "auto":
        # A frozen model needs only its shard of the weights on each rank.
        sharded = "fsdp2" if name == "reference" else STRATEGIES[planned.sharding]
        strategy = "single" if len(slots) == 1 else sharded
    parallel = config.learner.parallel
    if strategy == "fsdp2" and name == "policy" and planned.mesh is not None:
        strategy, parallel = "mesh", ParallelConfig(**asdict(planned.mesh))
    elif not find_strategy(strategy).mesh:
        parallel = ParallelConfig()
    return {
        "strategy": strategy,
        "parallel": parallel,
        "actor_options": [slot.options() for slot in slots],
        "cpu_offload": "step" in planned.offload and find_strategy(strategy).cpu_offload,
    }


def separate_roles(placed: PlacedPlan) -> list[str]:
    """Those of reference and critic that are on other devices than the policy's training."""
    train = set(placed.plan.placements["actor_train"].devices)
    planned = {name: placed.plan.placements.get(ROLES[name]) for name in ("reference", "critic")}
    return [name for name, role in planned.items() if role is not None and set(role.devices) != train]


def offloads(placed: PlacedPlan, role: Role = "actor_train") -> tuple[str, ...]:
    """The parts of a role's learner that move to host memory while engines generate."""
    return tuple(part for part in OFFLOADABLE if part in placed.plan.placements[role].offload)


def all_offloads(placed: PlacedPlan) -> tuple[str, ...]:
    """The parts that any of the learners offloads."""
    parts = {part for role in ROLES.values() if role in placed.slots for part in offloads(placed, role)}
    return tuple(part for part in OFFLOADABLE if part in parts)


def engine_slots(placed: PlacedPlan) -> Sequence[ActorSlot]:
    """One slot per engine: the first device of each tensor-parallel group."""
    return placed.slots["actor_infer"][:: placed.plan.placements["actor_infer"].tensor_parallel]


def shared_engines(placed: PlacedPlan) -> list[int]:
    """Indices of the engines on a device that the learner, its reference or its critic uses too."""
    roles = [role for role in ROLES.values() if role in placed.slots]
    used = {slot.device for role in roles for slot in placed.slots[role]}
    return [number for number, slot in enumerate(engine_slots(placed)) if slot.device in used]


def engines_are_apart(plan: Plan) -> bool:
    """Whether there are engines, none of which is on a device of the learner, its reference or its critic."""
    engines = plan.placements.get("actor_infer")
    used = {
        device
        for role in ROLES.values()
        if role in plan.placements
        for device in plan.placements[role].devices
    }
    return engines is not None and bool(engines.devices) and used.isdisjoint(engines.devices)


def _offloads_by_role(placed: PlacedPlan) -> dict[str, Sequence[str]]:
    """The parts that each role may offload: all of them if there are no separate roles."""
    separate = separate_roles(placed)
    if not separate:
        return {"policy": OFFLOADABLE}
    return {name: offloads(placed, ROLES[name]) for name in ("policy", *separate)}


def _open_role(
    name: str,
    model: Path,
    learner: LearnerConfig,
    loss: LossConfig,
    options: LearnerOptions,
    config: TrainConfig,
    placed: PlacedPlan,
) -> RayLearner:
    arguments = placement(config, placed, name)
    options = replace(options, cpu_offload=arguments.pop("cpu_offload"))
    learner = replace(learner, parallel=arguments.pop("parallel"))
    timeout = config.ray.heartbeat_timeout
    return RayLearner(
        model,
        learner,
        loss,
        options,
        role=ROLES[name],
        imports=config.imports,
        heartbeat_timeout=timeout,
        **arguments,
    )


def _reference(config: TrainConfig, model: Path, placed: PlacedPlan) -> RayLearner:
    """A learner that only computes log-probs: it has weights and no optimizer state."""
    # A frozen model is sharded by `fsdp2`, whatever mesh trains the policy.
    learner = replace(policy_config(config.learner), lora=None, parallel=ParallelConfig())
    options = LearnerOptions(temperature=config.agent.temperature)
    loss = LossConfig("reinforce", tis_cap=None)
    return _open_role("reference", model, learner, loss, options, config, placed)


def _critic(config: TrainConfig, model: Path, placed: PlacedPlan) -> RayLearner:
    options = replace(learner_options(config), value_only=True)
    loss = replace(config.loss, kl_target=None, entropy_target=None)
    return _open_role("critic", model, config.learner, loss, options, config, placed)
