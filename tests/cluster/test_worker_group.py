"""A local Ray with logical GPUs: placement of plans, and groups of ranks."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import cluster_rank
import numpy as np
import pytest
import torch
from cluster_rank import Rank

from rollgym.cluster.connect import Connection, connect
from rollgym.cluster.errors import ActorLost, PlacementError
from rollgym.cluster.object_store import share_tensors, share_weights
from rollgym.cluster.placement import PlacedPlan, bundles, place
from rollgym.cluster.worker_group import WorkerGroup
from rollgym.core.errors import RunError, UsageError
from rollgym.devices.types import Cluster, Device, Layout, Node, Placement, Plan, Role
from rollgym.engines.base import WeightSource
from rollgym.engines.weight_sync.chain import WeightChain

ray: Any = pytest.importorskip("ray")
T = TypeVar("T")


@pytest.fixture(scope="module")
def here() -> Iterator[Connection]:
    ray.cloudpickle.register_pickle_by_value(cluster_rank)
    with connect(gpus=4, cpus=6) as connection:
        yield connection


def plan_of(cluster: Cluster, layout: Layout = "split", **roles: tuple[int, ...]) -> Plan:
    """Roles on devices by their numbers."""
    placements: dict[Any, Placement] = {}
    for name, numbers in roles.items():
        role: Role = name  # type: ignore[assignment]
        devices = tuple(cluster.devices[number] for number in numbers)
        placements[role] = Placement(role=role, devices=devices, data_parallel=len(devices))
    return Plan(cluster=cluster, layout=layout, placements=placements)


def placing(
    work: Callable[[PlacedPlan], Awaitable[T]], plan: Plan, connection: Connection | None = None
) -> T:
    """Do something with the devices of a plan."""

    async def main() -> T:
        placed = await place(plan, connection)
        try:
            return await work(placed)
        finally:
            placed.release()

    return asyncio.run(main())


def test_the_machine_is_seen_as_its_logical_gpus(here: Connection) -> None:
    (node,) = here.cluster.nodes
    assert (node.kind, node.devices, node.cpus) == ("gpu", 4, 6)
    assert 0 < node.memory <= node.host_memory // 4
    assert len(here.cluster.devices) == 4
    with pytest.raises(UsageError, match="already connected to Ray"), connect():
        pass


def test_roles_on_separate_devices_have_them_whole(here: Connection) -> None:
    plan = plan_of(here.cluster, actor_train=(0, 1), actor_infer=(2,))

    async def work(placed: PlacedPlan) -> tuple[list[list[int]], list[int]]:
        train = WorkerGroup("actor_train", Rank, [s.options() for s in placed.slots["actor_train"]])
        infer = WorkerGroup("actor_infer", Rank, [s.options() for s in placed.slots["actor_infer"]])
        found = train.call(Rank.gpus), infer.call(Rank.gpus)[0]
        train.close()
        infer.close()
        return found

    train, infer = placing(work, plan, here)
    assert len({*train[0], *train[1], *infer}) == 3, "three GPUs, each with one role"
    assert [len(gpus) for gpus in (*train, infer)] == [1, 1, 1]


def test_roles_that_share_a_device_sit_on_the_same_one(here: Connection) -> None:
    plan = plan_of(here.cluster, "colocated", actor_train=(0, 1), actor_infer=(1,))

    async def work(placed: PlacedPlan) -> dict[str, list[list[int]]]:
        workers = {
            role: WorkerGroup(role, Rank, [slot.options() for slot in slots])
            for role, slots in placed.slots.items()
        }
        found = {str(role): worker.call(Rank.gpus) for role, worker in workers.items()}
        assert [slot.gpus for slot in placed.slots["actor_train"]] == [1.0, 0.5]
        for worker in workers.values():
            worker.close()
        return found

    found = placing(work, plan, here)
    assert found["actor_infer"] == found["actor_train"][1:]
    assert found["actor_train"][0] != found["actor_train"][1]


def test_bundles_are_whole_devices_by_node() -> None:
    gpu = Node(name="a", devices=2, memory=1)
    cpu = Node(name="b", kind="cpu", devices=1, memory=1)
    plan = plan_of(Cluster((gpu, cpu)), "overlapping", actor_train=(0, 1), actor_infer=(1, 2))
    both = {"GPU": 1.0, "CPU": 1.0}
    assert bundles(plan) == {0: {Device(0, 0): both, Device(0, 1): both}, 1: {Device(1, 0): {"CPU": 1.0}}}


def test_waiting_reports_what_is_missing_and_times_out(here: Connection) -> None:
    much = Cluster((Node(name="big", devices=6, memory=1),))
    said: list[str] = []

    async def main() -> None:
        plan = plan_of(much, actor_train=(0, 1, 2, 3, 4, 5))
        await place(plan, interval=0.2, timeout=1.1, report=said.append)

    with pytest.raises(PlacementError) as given_up:
        asyncio.run(main())
    sentence = (
        "The plan is waiting for 6 CPU (total 6, free 6), 6 GPU (total 4, free 4) on one node; the cluster"
    )
    assert str(given_up.value).startswith(sentence)
    assert str(given_up.value).endswith("has 1 node. Timed out after 1.1 s.")
    assert len(said) >= 3
    assert said[0].startswith(sentence)


def test_a_plan_for_other_nodes_is_refused(here: Connection) -> None:
    two = Cluster((Node(name="a", devices=1, memory=1), Node(name="b", devices=1, memory=1)))

    async def nothing(placed: PlacedPlan) -> None:
        return

    with pytest.raises(UsageError, match="uses node 1, but there are 1: plan again"):
        placing(nothing, plan_of(two, actor_train=(1,)), here)


PLACES = [{"num_cpus": 1}] * 2


@pytest.fixture
def two(here: Connection) -> Iterator[WorkerGroup[Rank]]:
    worker = WorkerGroup("critic", Rank, PLACES, start=10)
    yield worker
    worker.close()


def test_a_call_reaches_all_ranks_or_one(two: WorkerGroup[Rank]) -> None:
    assert two.call(Rank.who) == [(0, 2, 10), (1, 2, 10)]
    assert two.call(Rank.add, [1, 2], more=100) == [113, 113]
    assert two.call_one(1, Rank.who) == (1, 2, 10)
    array = np.ones(1_000_000)
    assert two.call(Rank.total, array) == [(1e6, False)] * 2, "all read the one copy that was stored"


def test_errors_of_a_method_keep_their_type(two: WorkerGroup[Rank]) -> None:
    with pytest.raises(UsageError, match=r"^That cannot be\.$"):
        two.call(Rank.refuse, True)
    with pytest.raises(RunError, match=r"^critic rank \d failed: ValueError: what a pity"):
        two.call(Rank.refuse, False)
    assert two.call_one(0, Rank.who) == (0, 2, 10), "and the ranks live on"


def test_a_death_names_role_and_rank_and_new_ranks_can_start(two: WorkerGroup[Rank]) -> None:
    with pytest.raises(ActorLost, match="critic rank 1 is lost") as lost:
        two.call(Rank.die_while_others_wait, 1)
    assert (lost.value.role, lost.value.rank) == ("critic", 1)
    with pytest.raises(ActorLost) as again:
        two.call(Rank.who)
    assert again.value.rank == 1
    two.start(PLACES[:1])
    assert two.call(Rank.who) == [(0, 1, 10)], "there may be fewer"


def test_a_rank_that_hangs_is_found(here: Connection) -> None:
    worker = WorkerGroup("critic", Rank, PLACES, heartbeat_timeout=2.0)
    try:
        pids = worker.call(Rank.pid)
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(ActorLost) as lost:
            worker.call(Rank.nap, 600.0)
        said = "critic rank 1 is lost: no heartbeat for 2 s, killed"
        assert (str(lost.value), lost.value.role, lost.value.rank) == (said, "critic", 1)
    finally:
        worker.close()


@pytest.mark.slow
def test_a_rank_that_works_for_longer_than_the_timeout_does_not_hang(here: Connection) -> None:
    worker = WorkerGroup("critic", Rank, PLACES, heartbeat_timeout=4.0)
    try:
        assert worker.call(Rank.nap, 12.0) == [0, 1]
        pids = worker.call(Rank.pid)
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(ActorLost, match="critic rank 0 is lost: no heartbeat for 4 s, killed"):
            worker.call(Rank.nap, 600.0)
    finally:
        worker.close()


def test_tensors_come_back_bit_for_bit_in_buckets(here: Connection) -> None:
    tensors = {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.randn(5, 3).to(torch.bfloat16),
        "c": torch.tensor(7),
        "d": torch.zeros(0, 4),
    }
    shared = share_tensors(tensors, bucket=32)
    assert list(shared) == list(tensors)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    tensors["a"].zero_()
    for name, tensor in kept.items():
        assert shared[name].dtype == tensor.dtype
        assert torch.equal(shared[name], tensor), f"{name} is as it was when it was stored"

    @ray.remote
    def read(there: WeightChain) -> list[float]:
        return [float(tensor.float().sum()) for tensor in there.values()]

    assert ray.get(read.remote(shared)) == [float(tensor.float().sum()) for tensor in kept.values()]
    source = share_weights(WeightSource(buckets=lambda: iter([[("a", kept["a"])], [], [("c", kept["c"])]])))
    assert source.tensors is not None
    assert list(source.tensors) == ["a", "c"]
    assert share_weights(source) is source, "stored once"
