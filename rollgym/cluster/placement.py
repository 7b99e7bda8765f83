"""Reserves the devices of a plan: a bundle for each device, an actor slot on it for each role."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollgym.cluster.connect import Connection
from rollgym.cluster.errors import PlacementError, need_ray
from rollgym.cluster.wait import INTERVAL, Report, print_status, wait_for_resources
from rollgym.core.errors import UsageError
from rollgym.devices.types import Device, DeviceKind, Plan, Role


@dataclass(frozen=True, slots=True)
class ActorSlot:
    """Slot of one rank of a role: a placement-group bundle and the role's share of its device."""

    device: Device
    group: Any = field(repr=False)
    bundle: int
    gpus: float
    cpus: float

    def options(self) -> dict[str, Any]:
        """Return the Ray options of an actor in this slot."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)
        return {"num_gpus": self.gpus, "num_cpus": self.cpus, "scheduling_strategy": where}


def node_options(name: str, kind: DeviceKind) -> dict[str, Any]:
    """Return the Ray options of an actor on a whole, unreserved device of a node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(name, soft=False)
    return {"num_gpus": float(kind == "gpu"), "num_cpus": 1.0, "scheduling_strategy": where}


@dataclass(slots=True)
class PlacedPlan:
    """A plan whose devices are reserved."""

    plan: Plan
    slots: Mapping[Role, tuple[ActorSlot, ...]]
    """The slots of each role, in the order of its ranks."""
    groups: tuple[Any, ...] = field(repr=False)
    nodes: tuple[str, ...] = ()
    """Ray ids of the nodes of ``groups``; empty if the plan was placed on any nodes."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of the groups that outlive this process, by node of the plan."""

    def node_of(self, options: Mapping[str, Any]) -> str | None:
        """Return the Ray id of the node that Ray options name, by a slot of this plan or directly."""
        where = options.get("scheduling_strategy")
        if (name := getattr(where, "node_id", None)) is not None:
            return str(name)
        homes = {group.id: node for group, node in zip(self.groups, self.nodes, strict=False)}
        return homes.get(getattr(getattr(where, "placement_group", None), "id", None))

    def release(self) -> None:
        """Free the devices; their actors are killed."""
        from ray.util.placement_group import remove_placement_group

        for group in self.groups:
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        self.groups = self.nodes = ()
        self.names = {}


def bundles(plan: Plan) -> dict[int, dict[Device, dict[str, float]]]:
    """Return the resources to reserve, by node and device, for all devices of the plan."""
    reserved: dict[int, dict[Device, dict[str, float]]] = {}
    used = sorted({device for placement in plan.placements.values() for device in placement.devices})
    for device in used:
        if device not in set(plan.cluster.devices):
            raise UsageError(f"The plan places a role on {device}, which is not in its cluster.")
        kind = plan.cluster.nodes[device.node].kind
        resources = {"GPU": 1.0, "CPU": 1.0} if kind == "gpu" else {"CPU": 1.0}
        reserved.setdefault(device.node, {})[device] = resources
    return reserved


async def place(
    plan: Plan,
    connection: Connection | None = None,
    *,
    names: Mapping[int, str] | None = None,
    kept: Mapping[int, Any] | None = None,
    interval: float = INTERVAL,
    timeout: float | None = None,
    report: Report = print_status,
) -> PlacedPlan:
    """Reserve the devices of a plan, waiting until all are free.

    Args:
        plan: The plan.
        connection: The cluster that the plan was made for: each role gets exactly its planned nodes. Without
            it, any nodes with enough devices are used.
        names: Names of reservations that outlive this process, by node of the plan.
        kept: Reservations of a former process for the same plan, by node; they are not made again.
        interval: Seconds between two status messages.
        timeout: Seconds after which `PlacementError` is raised.
        report: Receives the status messages.
    """
    need_ray()
    from ray.util.placement_group import placement_group

    wanted, names, kept = bundles(plan), names or {}, kept or {}
    groups = {
        node: kept[node]
        if node in kept
        else placement_group(
            list(devices.values()),
            strategy="STRICT_PACK",
            bundle_label_selector=_pins(connection, node, len(devices)),
            name=names.get(node, ""),
            lifetime="detached" if node in names else None,
        )
        for node, devices in wanted.items()
    }
    nodes = () if connection is None else tuple(connection.nodes[node] for node in wanted)
    placed = PlacedPlan(plan, _slots(plan, wanted, groups), tuple(groups.values()), nodes, names)
    new = [node for node in wanted if node not in kept]
    try:
        if new:
            ready = asyncio.gather(*(_ready(groups[node]) for node in new))
            needs = [_sum(wanted[node]) for node in new]
            await wait_for_resources(ready, needs, "The plan", interval, report, timeout)
    except BaseException:
        placed.release()
        raise
    return placed


async def _ready(group: Any) -> None:
    if not await group.ready():
        raise PlacementError("Ray could not reserve the devices of the plan.")


def _pins(connection: Connection | None, node: int, count: int) -> list[dict[str, str]] | None:
    if connection is None:
        return None
    if node >= len(connection.nodes):
        raise UsageError(f"The plan uses node {node}, but there are {len(connection.nodes)}: plan again.")
    return [{"ray.io/node-id": connection.nodes[node]}] * count


def _sum(devices: Mapping[Device, Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for resources in devices.values():
        total.update(resources)
    return dict(total)


def _slots(
    plan: Plan, wanted: Mapping[int, Mapping[Device, Mapping[str, float]]], groups: Mapping[int, Any]
) -> dict[Role, tuple[ActorSlot, ...]]:
    sharing = Counter(device for placement in plan.placements.values() for device in placement.devices)
    slots_of: dict[Role, tuple[ActorSlot, ...]] = {}
    for role, placement in plan.placements.items():
        slots = []
        for device in placement.devices:
            bundle = list(wanted[device.node]).index(device)
            resources, share = wanted[device.node][device], _share(sharing[device])
            gpus, cpus = resources.get("GPU", 0.0) * share, resources["CPU"] * share
            slots.append(ActorSlot(device, groups[device.node], bundle, gpus, cpus))
        if slots:
            slots_of[role] = tuple(slots)
    return slots_of


def _share(roles: int) -> float:
    """Return the share of a device per role, rounded down: Ray counts in ten-thousandths."""
    return int(10_000 / roles) / 10_000
