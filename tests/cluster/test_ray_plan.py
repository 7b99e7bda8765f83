"""What is planned after a loss, who waits for what, and what a plan means for the learner. Without Ray."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from training import SMALL, merged

from rollgym.cluster.connect import Connection
from rollgym.cluster.placement import Placed, Seat
from rollgym.config import load
from rollgym.devices.types import Cluster, Node, Plan
from rollgym.errors import UsageError
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.ray_plan import plan_again, plan_first
from rollgym.trainer.ray_roles import apart, engine_seats, leaves, seating, shared_engines

GB = 10**9
NODE = Node(name="a", devices=1, memory=8 * GB, host_memory=8 * GB, cpus=4)


def config_of(**changes: Any) -> TrainConfig:
    return load(TrainConfig, merged(SMALL, {"runtime": "ray", **changes}))


def with_nodes(count: int, **changes: Any) -> Connection:
    nodes = tuple(replace(NODE, name=f"n{at}", **changes) for at in range(count))
    return Connection("somewhere", Cluster(nodes), tuple(f"id{at}" for at in range(count)))


class Changing:
    """A cluster that has another number of nodes each time it is looked at."""

    def __init__(self, *counts: int) -> None:
        self._counts = list(counts)

    def again(self) -> Connection:
        return with_nodes(self._counts.pop(0) if len(self._counts) > 1 else self._counts[0])


def again(config: TrainConfig, whole: int, *counts: int) -> tuple[Plan, list[str]]:
    said: list[str] = []
    cluster: Any = Changing(*counts)
    plan, _ = asyncio.run(plan_again(config, cluster, whole, interval=0.0, look=0.0, say=said.append))
    return plan, said


def test_what_is_left_is_planned_for_at_once() -> None:
    plan, said = again(config_of(), 3, 2)
    assert len(plan.cluster.devices) == 2
    assert said == []


def test_pins_of_devices_that_are_gone_are_given_up() -> None:
    pins = {"layout": "split", "actor_train": "gpu[0]", "actor_infer": "gpu[1-2]"}
    plan, said = again(config_of(devices=pins), 3, 1)
    assert {len(one.devices) for one in plan.placements.values()} == {1}
    assert said == []
    plan, _ = again(config_of(devices=pins), 3, 3)
    assert plan.layout == "split", "all are back: as it was wished"


def test_a_run_that_waits_says_what_for_and_goes_on_with_all() -> None:
    plan, said = again(config_of(devices={"when_lost": "wait"}), 3, 1, 2, 3)
    assert len(plan.cluster.devices) == 3
    assert [one.partition(";")[0] for one in said] == [
        "The run waits for 2 of its 3 devices",
        "The run waits for 1 of its 3 devices",
    ]
    assert "there are 2 nodes x 1 GPU (7.5 GiB)" in said[1]


def test_a_plan_that_cannot_fit_is_one_sentence_and_waits_only_where_more_may_come() -> None:
    small = with_nodes(1, memory=GB // 100)
    with pytest.raises(UsageError, match=r"^Training built-in tiny .* does not fit on 1 GPU .*missing"):
        plan_first(config_of(), small)

    class Small(Changing):
        def again(self) -> Connection:
            return small if len(super().again().nodes) < 2 else with_nodes(2)

    said: list[str] = []
    cluster: Any = Small(1, 2)
    plan, _ = asyncio.run(plan_again(config_of(), cluster, 2, interval=0.0, look=0.0, say=said.append))
    assert len(plan.cluster.devices) == 2
    assert len(said) == 1
    assert "does not fit" in said[0]
    cluster = Small(1)
    with pytest.raises(UsageError, match="does not fit"):
        asyncio.run(plan_again(config_of(), cluster, 1, look=0.0))


def placed(config: TrainConfig, count: int) -> Placed:
    plan = plan_first(config, with_nodes(count))
    seats = {
        role: tuple(Seat(device, f"group{device.node}", 0, 1.0, 1.0) for device in one.devices)
        for role, one in plan.placements.items()
    }
    return Placed(plan, seats, ())


def test_roles_are_apart_where_they_are_pinned_elsewhere() -> None:
    more = {
        "estimator": "gae",
        "learner": {"critic": "own"},
        "loss": {"name": "ppo", "kl_coef": 0.01},
        "rollout": {"group_size": 4},
    }
    train = {"layout": "split", "actor_train": "gpu[0]", "actor_infer": "gpu[1]"}
    here = placed(config_of(devices=train, **more), 2)
    assert apart(here) == []
    assert shared_engines(here) == []
    config = config_of(devices={**train, "reference": "gpu[1]", "critic": "gpu[2-3]"}, **more)
    there = placed(config, 4)
    assert apart(there) == ["reference", "critic"]
    assert shared_engines(there) == [0], "its device is the reference's too"
    assert len(engine_seats(there)) == 1


def test_strategies_are_the_plans_and_what_leaves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seat, "options", lambda seat: {"on": seat.device})
    config = config_of(devices={"layout": "colocated", "offload": "all"})
    two = placed(config, 2)
    assert seating(config, two, "policy")["strategy"] in ("ddp", "zero1", "zero2", "fsdp2")
    assert len(seating(config, two, "policy")["places"]) == 2
    one = placed(config, 1)
    assert seating(config, one, "policy")["strategy"] == "local"
    assert leaves(one) == ("optimiser", "weights")
    assert leaves(placed(config_of(devices={"layout": "colocated", "offload": "none"}), 1)) == ()
    picked = config_of(strategy="zero2")
    assert seating(picked, placed(picked, 2), "policy")["strategy"] == "zero2"
