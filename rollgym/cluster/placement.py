"""A plan becomes places: one bundle of resources for each device, a seat on it for each role that uses it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollgym.cluster.connect import Connection
from rollgym.cluster.errors import PlacementError, need_ray
from rollgym.cluster.waiting import INTERVAL, Say, tell, waiting
from rollgym.devices.types import Device, DeviceKind, Plan, Role
from rollgym.errors import UsageError


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one rank of a role sits: a bundle, and the share of its device that is the role's."""

    device: Device
    group: Any = field(repr=False)
    bundle: int
    gpus: float
    cpus: float

    def options(self) -> dict[str, Any]:
        """For an actor's ``options``."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        return {"num_gpus": self.gpus, "num_cpus": self.cpus, "scheduling_strategy": where}


def on_node(name: str, kind: DeviceKind) -> dict[str, Any]:
    """For an actor's ``options``: a whole device of a node, which nobody has set aside."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(name, soft=False)
    return {"num_gpus": float(kind == "gpu"), "num_cpus": 1.0, "scheduling_strategy": where}


@dataclass(slots=True)
class Placed:
    """A plan whose devices are taken."""

    plan: Plan
    seats: Mapping[Role, tuple[Seat, ...]]
    """Of each role with a device, in the order of its ranks."""
    groups: tuple[Any, ...] = field(repr=False)

    def release(self) -> None:
        """Give the devices back; actors that sit there end."""
        from ray.util.placement_group import remove_placement_group

        for group in self.groups:
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        self.groups = ()


def bundles(plan: Plan) -> dict[int, dict[Device, dict[str, float]]]:
    """What is to be set aside, by node and device: all devices that any role uses."""
    found: dict[int, dict[Device, dict[str, float]]] = {}
    used = sorted({device for one in plan.placements.values() for device in one.devices})
    for device in used:
        if device not in set(plan.cluster.devices):
            raise UsageError(f"The plan puts a role on {device}, which is no device of its cluster.")
        kind = plan.cluster.nodes[device.node].kind
        resources = {"GPU": 1.0, "CPU": 1.0} if kind == "gpu" else {"CPU": 1.0}
        found.setdefault(device.node, {})[device] = resources
    return found


async def place(
    plan: Plan,
    connection: Connection | None = None,
    *,
    interval: float = INTERVAL,
    timeout: float | None = None,
    say: Say = tell,
) -> Placed:
    """Take the devices of a plan, waiting until all are free.

    Args:
        plan: Who works where.
        connection: Where the plan was made for its cluster: each role then gets the very nodes it names.
            Without, any nodes that have as many devices will do.
        interval: Seconds between two sentences about what is missing.
        timeout: Seconds after which it is a `PlacementError`.
        say: Who is told.
    """
    need_ray()
    from ray.util.placement_group import placement_group

    wanted = bundles(plan)
    groups = {
        node: placement_group(
            list(devices.values()),
            strategy="STRICT_PACK",
            bundle_label_selector=_pins(connection, node, len(devices)),
        )
        for node, devices in wanted.items()
    }
    placed = Placed(plan, _seats(plan, wanted, groups), tuple(groups.values()))
    try:
        ready = asyncio.gather(*(_ready(group) for group in groups.values()))
        needs = [_sum(devices) for devices in wanted.values()]
        await waiting(ready, needs, "The plan", interval, say, timeout)
    except BaseException:
        placed.release()
        raise
    return placed


async def _ready(group: Any) -> None:
    if not await group.ready():
        raise PlacementError("Ray could not set devices aside for the plan.")


def _pins(connection: Connection | None, node: int, count: int) -> list[dict[str, str]] | None:
    if connection is None:
        return None
    if node >= len(connection.nodes):
        raise UsageError(f"The plan uses node {node} of {len(connection.nodes)}: make it anew.")
    return [{"ray.io/node-id": connection.nodes[node]}] * count


def _sum(devices: Mapping[Device, Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for resources in devices.values():
        total.update(resources)
    return dict(total)


def _seats(
    plan: Plan, wanted: Mapping[int, Mapping[Device, Mapping[str, float]]], groups: Mapping[int, Any]
) -> dict[Role, tuple[Seat, ...]]:
    sharing = Counter(device for one in plan.placements.values() for device in one.devices)
    found: dict[Role, tuple[Seat, ...]] = {}
    for role, placement in plan.placements.items():
        seats = []
        for device in placement.devices:
            bundle = list(wanted[device.node]).index(device)
            resources, share = wanted[device.node][device], _share(sharing[device])
            gpus, cpus = resources.get("GPU", 0.0) * share, resources["CPU"] * share
            seats.append(Seat(device, groups[device.node], bundle, gpus, cpus))
        if seats:
            found[role] = tuple(seats)
    return found


def _share(roles: int) -> float:
    """Of a device: Ray counts in ten-thousandths, so the shares must not add up to more."""
    return int(10_000 / roles) / 10_000
