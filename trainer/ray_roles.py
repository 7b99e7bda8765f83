"""What a plan means for a run on Ray: who learns where and how, and which engines share a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollgym.cluster.placement import Placed, Seat
from rollgym.devices.types import Role
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.learner.apart import LearnerApart, policy_settings
from rollgym.trainer.learner.parts import PARTS
from rollgym.trainer.learner.remote import LOCAL, RemoteLearner
from rollgym.trainer.loss_settings import LossSettings
from rollgym.trainer.setup import learner_options

STRATEGIES = {"none": "ddp", "optimiser": "zero1", "gradients": "zero2", "weights": "fsdp2"}
"""What the ranks of training hold a part of, by what the plan says."""
ROLES: dict[str, Role] = {"policy": "actor_train", "reference": "reference", "critic": "critic"}
ClusterLearner = RemoteLearner | LearnerApart


def open_learner(config: TrainConfig, model: Path, placed: Placed) -> ClusterLearner:
    """The learner where the plan puts it; reference and critic in it, or on devices of their own."""
    others = apart(placed)
    options = learner_options(config)
    if "reference" in others:
        options["keep_reference"] = False
    settings = policy_settings(config.learner) if "critic" in others else config.learner
    made: dict[str, RemoteLearner] = {}
    try:
        made["policy"] = RemoteLearner(
            model=model, settings=settings, loss=config.loss, **seating(config, placed, "policy"), **options
        )
        if "reference" in others:
            made["reference"] = _reference(config, model, placed)
        if "critic" in others:
            made["critic"] = _critic(config, model, placed)
    except BaseException:
        for one in made.values():
            one.close()
        raise
    if not others:
        return made["policy"]
    return LearnerApart(**made, leaves={name: leaves(placed, ROLES[name]) for name in made})


def restart_learner(learner: ClusterLearner, config: TrainConfig, placed: Placed) -> None:
    """Start all ranks anew, where another plan puts them."""
    if isinstance(learner, RemoteLearner):
        learner.restart(**_reseating(config, placed, "policy"))
        return
    names = ("policy", *apart(placed))
    learner.leaves = {name: leaves(placed, ROLES[name]) for name in names}
    learner.restart(**{name: _reseating(config, placed, name) for name in names})


def seating(config: TrainConfig, placed: Placed, name: str) -> dict[str, Any]:
    """What a learner of the cluster is told about its places."""
    role = ROLES[name]
    seats, placement = placed.seats[role], placed.plan.placements[role]
    strategy: str = config.strategy
    if name == "reference" or strategy == "auto":
        # A frozen model needs no more of each rank than its part of the weights.
        shared = "fsdp2" if name == "reference" else STRATEGIES[placement.sharding]
        strategy = LOCAL if len(seats) == 1 else shared
    host = "step" in placement.offload and strategy not in (LOCAL, "ddp")
    found: dict[str, Any] = {
        "strategy": strategy,
        "places": [seat.options() for seat in seats],
        "role": role,
        "modules": config.rollout.modules,
        "heartbeat_timeout": config.heartbeat_timeout,
    }
    return {**found, "offload": True} if host else found


def apart(placed: Placed) -> list[str]:
    """Which of reference and critic are on other devices than the policy's training."""
    train = set(placed.plan.placements["actor_train"].devices)
    found = {name: placed.plan.placements.get(ROLES[name]) for name in ("reference", "critic")}
    return [name for name, one in found.items() if one is not None and set(one.devices) != train]


def leaves(placed: Placed, role: Role = "actor_train") -> tuple[str, ...]:
    """What of a role that learns goes to the host's memory while engines work."""
    return tuple(part for part in PARTS if part in placed.plan.placements[role].offload)


def all_leaves(placed: Placed) -> tuple[str, ...]:
    """What goes to the host's memory of any of them."""
    found = {part for role in ROLES.values() if role in placed.seats for part in leaves(placed, role)}
    return tuple(part for part in PARTS if part in found)


def engine_seats(placed: Placed) -> Sequence[Seat]:
    """One for each copy of the policy that generates: the first device of those that hold it together."""
    return placed.seats["actor_infer"][:: placed.plan.placements["actor_infer"].tensor_parallel]


def shared_engines(placed: Placed) -> list[int]:
    """The engines whose device the learner uses too, or its reference or critic."""
    roles = [role for role in ROLES.values() if role in placed.seats]
    used = {seat.device for role in roles for seat in placed.seats[role]}
    return [number for number, seat in enumerate(engine_seats(placed)) if seat.device in used]


def _reseating(config: TrainConfig, placed: Placed, name: str) -> dict[str, Any]:
    found = seating(config, placed, name)
    return {"strategy": found["strategy"], "places": found["places"], "offload": found.get("offload")}


def _reference(config: TrainConfig, model: Path, placed: Placed) -> RemoteLearner:
    """A learner that is asked for log-probs and never updated: it has weights and nothing else."""
    return RemoteLearner(
        model=model,
        settings=replace(policy_settings(config.learner), lora=None),
        loss=LossSettings("reinforce", tis_cap=None),
        temperature=config.agent.temperature,
        **seating(config, placed, "reference"),
    )


def _critic(config: TrainConfig, model: Path, placed: Placed) -> RemoteLearner:
    return RemoteLearner(
        model=model,
        settings=config.learner,
        loss=config.loss,
        judges=True,
        **{**learner_options(config), "kl_target": None},
        **seating(config, placed, "critic"),
    )
