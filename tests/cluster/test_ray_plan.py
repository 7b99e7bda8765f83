"""Planning after a loss, waiting for devices, and what a plan means for the learner. Without Ray."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from training import SMALL, merged

from rollgym.cluster.connect import Connection
from rollgym.cluster.placement import ActorSlot, PlacedPlan
from rollgym.config.loader import load
from rollgym.core.errors import UsageError
from rollgym.devices.types import Cluster, Node, Plan
from rollgym.trainer.cluster.planning import plan_again, plan_first
from rollgym.trainer.cluster.roles import engine_slots, offloads, placement, separate_roles, shared_engines
from rollgym.trainer.config import TrainConfig

GB = 10**9
NODE = Node(name="a", devices=1, memory=8 * GB, host_memory=8 * GB, cpus=4)


def config_of(**changes: Any) -> TrainConfig:
    return load(TrainConfig, merged(SMALL, {"runtime": "ray", **changes}))


def with_nodes(count: int, **changes: Any) -> Connection:
    nodes = tuple(replace(NODE, name=f"n{at}", **changes) for at in range(count))
    return Connection("somewhere", Cluster(nodes), tuple(f"id{at}" for at in range(count)))


class Changing:
    """A cluster with another number of nodes at each check."""

    def __init__(self, *counts: int) -> None:
        self._counts = list(counts)

    def refresh(self) -> Connection:
        return with_nodes(self._counts.pop(0) if len(self._counts) > 1 else self._counts[0])


def again(config: TrainConfig, whole: int, *counts: int) -> tuple[Plan, list[str]]:
    said: list[str] = []
    cluster: Any = Changing(*counts)
    plan, _ = asyncio.run(plan_again(config, cluster, whole, interval=0.0, look=0.0, say=said.append))
    return plan, said


def test_the_remaining_nodes_are_planned_for_at_once() -> None:
    plan, said = again(config_of(), 3, 2)
    assert len(plan.cluster.devices) == 2
    assert said == []


def test_pins_of_lost_devices_are_dropped() -> None:
    pins = {"layout": "split", "actor_train": "gpu[0]", "actor_infer": "gpu[1-2]"}
    plan, said = again(config_of(devices=pins), 3, 1)
    assert {len(one.devices) for one in plan.placements.values()} == {1}
    assert said == []
    plan, _ = again(config_of(devices=pins), 3, 3)
    assert plan.layout == "split", "all are back: as configured"


def test_a_waiting_run_prints_what_is_missing_and_continues_with_all() -> None:
    plan, said = again(config_of(devices={"when_lost": "wait"}), 3, 1, 2, 3)
    assert len(plan.cluster.devices) == 3
    assert [one.partition(";")[0] for one in said] == [
        "Waiting for 2 of 3 devices",
        "Waiting for 1 of 3 devices",
    ]
    assert "the cluster has 2 nodes x 1 GPU (7.5 GiB)" in said[1]


def test_a_plan_that_does_not_fit_waits_only_if_more_devices_may_join() -> None:
    small = with_nodes(1, memory=GB // 100)
    with pytest.raises(UsageError, match=r"^Training built-in tiny .* does not fit on 1 GPU .*missing"):
        plan_first(config_of(), small)

    class Small(Changing):
        def refresh(self) -> Connection:
            return small if len(super().refresh().nodes) < 2 else with_nodes(2)

    said: list[str] = []
    cluster: Any = Small(1, 2)
    plan, _ = asyncio.run(plan_again(config_of(), cluster, 2, interval=0.0, look=0.0, say=said.append))
    assert len(plan.cluster.devices) == 2
    assert len(said) == 1
    assert "does not fit" in said[0]
    cluster = Small(1)
    with pytest.raises(UsageError, match="does not fit"):
        asyncio.run(plan_again(config_of(), cluster, 1, look=0.0))


def placed(config: TrainConfig, count: int) -> PlacedPlan:
    plan = plan_first(config, with_nodes(count))
    slots = {
        role: tuple(ActorSlot(device, f"group{device.node}", 0, 1.0, 1.0) for device in one.devices)
        for role, one in plan.placements.items()
    }
    return PlacedPlan(plan, slots, ())


def test_roles_pinned_elsewhere_are_separate() -> None:
    more = {
        "estimator": "gae",
        "learner": {"critic": "separate"},
        "loss": {"name": "ppo", "kl_coef": 0.01},
        "rollout": {"group_size": 4},
    }
    train = {"layout": "split", "actor_train": "gpu[0]", "actor_infer": "gpu[1]"}
    here = placed(config_of(devices=train, **more), 2)
    assert separate_roles(here) == []
    assert shared_engines(here) == []
    config = config_of(devices={**train, "reference": "gpu[1]", "critic": "gpu[2-3]"}, **more)
    there = placed(config, 4)
    assert separate_roles(there) == ["reference", "critic"]
    assert shared_engines(there) == [0], "the reference uses its device too"
    assert len(engine_slots(there)) == 1


def test_strategy_and_offloading_come_from_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActorSlot, "options", lambda slot: {"on": slot.device})
    config = config_of(devices={"layout": "colocated", "offload": "all"})
    two = placed(config, 2)
    assert placement(config, two, "policy")["strategy"] in ("ddp", "zero1", "zero2", "fsdp2")
    assert len(placement(config, two, "policy")["actor_options"]) == 2
    one = placed(config, 1)
    assert placement(config, one, "policy")["strategy"] == "single"
    assert offloads(one) == ("optimizer", "weights")
    assert offloads(placed(config_of(devices={"layout": "colocated", "offload": "none"}), 1)) == ()
    picked = config_of(learner={"strategy": "zero2"})
    assert placement(picked, placed(picked, 2), "policy")["strategy"] == "zero2"


def test_a_mesh_must_fit_the_planned_ranks() -> None:
    parallel = {"replicate": 2}
    mesh = config_of(learner={"strategy": "mesh", "parallel": parallel}, devices={"layout": "colocated"})
    four = plan_first(mesh, with_nodes(4))
    assert len(four.placements["actor_train"].devices) == 4
    with pytest.raises(UsageError, match="dimensions must divide that number, with 3 devices in all"):
        plan_first(mesh, with_nodes(3))
    with pytest.raises(UsageError, match=r"learner\.parallel requires learner\.strategy=mesh"):
        config_of(learner={"strategy": "fsdp2", "parallel": {"tensor": 2}})
