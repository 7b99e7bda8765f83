"""Candidate device assignments. Devices of equal nodes are interchangeable, so few candidates suffice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rollgym.core.errors import UsageError
from rollgym.devices.ranges import parse_range
from rollgym.devices.types import Cluster, Device, DeviceConfig, Layout, Role
from rollgym.devices.workload import Job

Numbers = tuple[int, ...]
"""Device numbers: positions in `Cluster.devices`."""
USABLE = {"gpu": 0.9, "cpu": 0.75}
"""Fraction of a device's memory that a plan may use: the rest is for the driver, fragmentation and, in host
memory, other processes."""
MAX_TENSOR_PARALLEL = 64


@dataclass(frozen=True)
class Group:
    """Devices with the same roles."""

    numbers: Numbers
    roles: tuple[Role, ...]
    limit: int
    """Usable bytes of each device."""


@dataclass(frozen=True)
class Candidate:
    """An assignment of devices to all roles."""

    site: Site
    layout: Layout
    sets: Mapping[Role, Numbers]
    tensor_parallel: int

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The devices, grouped by their roles."""
        parts: list[tuple[frozenset[int], tuple[Role, ...]]] = []
        by_set: dict[frozenset[int], tuple[Role, ...]] = {}
        for role, numbers in self.sets.items():
            key = frozenset(numbers)
            by_set[key] = (*by_set.get(key, ()), role)
        for new, roles in by_set.items():
            cut = [(old & new, (*others, *roles)) for old, others in parts]
            cut += [(old - new, others) for old, others in parts]
            parts = [*cut, (new.difference(*(old for old, _ in parts)), roles)]
        groups = [Group(alike, roles, limit) for held, roles in parts for alike, limit in self._alike(held)]
        return tuple(sorted(groups, key=lambda group: group.numbers[0]))

    def _alike(self, numbers: frozenset[int]) -> Iterator[tuple[Numbers, int]]:
        by_limit: dict[int, list[int]] = {}
        for number in sorted(numbers):
            by_limit.setdefault(self.site.limits[number], []).append(number)
        for limit, alike in by_limit.items():
            yield tuple(alike), limit

    @cached_property
    def hosts(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(host memory, number of devices of each group) of each kind of node."""
        counts = [Counter(map(self.site.node_of.__getitem__, group.numbers)) for group in self.groups]
        nodes = self.site.cluster.nodes
        held = {node for count in counts for node in count}
        return tuple({(nodes[node].host_memory, tuple(count[node] for count in counts)) for node in held})

    @cached_property
    def shared(self) -> frozenset[Role]:
        """Roles that share a device with another role."""
        return frozenset(role for group in self.groups if len(group.roles) > 1 for role in group.roles)


class Site:
    """A cluster with lookups by device number."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.devices: tuple[Device, ...] = cluster.devices
        if not self.devices:
            raise UsageError("The cluster has no devices to plan for.")
        self.node_of = [device.node for device in self.devices]
        nodes = [cluster.nodes[node] for node in self.node_of]
        self.limits = [int(USABLE[node.kind] * node.memory) for node in nodes]
        """Usable bytes of each device."""
        self._by_node: dict[Numbers, Mapping[int, Sequence[int]]] = {}

    def nodes_of(self, numbers: Sequence[int]) -> Mapping[int, Sequence[int]]:
        """Group device numbers by node."""
        key = tuple(numbers)
        if key not in self._by_node:
            by_node: dict[int, list[int]] = {}
            for number in key:
                by_node.setdefault(self.node_of[number], []).append(number)
            self._by_node[key] = by_node
        return self._by_node[key]

    def pools(self) -> Iterator[Numbers]:
        """Yield the devices for models: all of them, then only those with more memory."""
        nodes = self.cluster.nodes
        kinds = [node.kind for node in nodes]
        kind = "gpu" if "gpu" in kinds else "cpu"
        able = [number for number, device in enumerate(self.devices) if nodes[device.node].kind == kind]
        for least in sorted({self.limits[number] for number in able}):
            yield tuple(number for number in able if self.limits[number] >= least)

    def engines(self, pool: Sequence[int], tensor_parallel: int) -> Numbers:
        """Return the devices that form whole engines, within nodes if possible."""
        whole = [node for node in self.nodes_of(pool).values() if len(node) >= tensor_parallel]
        return tuple(
            number
            for node in whole or [list(pool)]
            for number in node[: len(node) // tensor_parallel * tensor_parallel]
        )


def candidates_for(site: Site, job: Job, requested: DeviceConfig) -> Iterator[Candidate]:
    """Yield all candidates that are compatible with the requested settings."""
    pins = _pins(site, job, requested)
    _check_layout(pins, requested)
    seen: set[tuple[Layout, int, Numbers, Numbers]] = set()
    for pool in site.pools():
        for tensor_parallel in _tensor_parallels(site, job, requested, pins, len(pool)):
            for layout, train, infer in _pairs(site, pool, tensor_parallel, pins):
                key = (layout, tensor_parallel, train, infer)
                if key in seen or not train or not infer or requested.layout not in ("auto", layout):
                    continue
                seen.add(key)
                sets: dict[Role, Numbers] = {"actor_train": train, "actor_infer": infer}
                for role in ("critic", "reference", "reward"):
                    if role in job.models():
                        sets[role] = pins.get(role, train)
                yield Candidate(site, layout, sets, tensor_parallel)


def layout_of(train: Sequence[int], infer: Sequence[int]) -> Layout:
    """Return the layout of two sets of devices."""
    both = set(train) & set(infer)
    if not both:
        return "split"
    return "colocated" if set(train) == set(infer) else "overlapping"


def _pins(site: Site, job: Job, requested: DeviceConfig) -> dict[Role, Numbers]:
    number_of = {device: number for number, device in enumerate(site.devices)}
    pins: dict[Role, Numbers] = {}
    for role in ("actor_train", "actor_infer", "critic", "reference", "reward"):
        text = getattr(requested, role)
        if text is None:
            continue
        if role not in job.models():
            raise UsageError(f"devices.{role} is {text!r}, but this run has no {role} model.")
        devices = parse_range(text, site.cluster, f"devices.{role}")
        pins[role] = tuple(number_of[device] for device in devices)
    return pins


def _check_layout(pins: Mapping[Role, Numbers], requested: DeviceConfig) -> None:
    if "actor_train" not in pins or "actor_infer" not in pins or requested.layout == "auto":
        return
    made = layout_of(pins["actor_train"], pins["actor_infer"])
    if made != requested.layout:
        raise UsageError(
            f"devices.layout is {requested.layout}, but devices.actor_train {requested.actor_train} and "
            f"devices.actor_infer {requested.actor_infer} are {made}: leave one of the three out."
        )


def _tensor_parallels(
    site: Site, job: Job, requested: DeviceConfig, pins: Mapping[Role, Numbers], count: int
) -> list[int]:
    heads = job.actor.heads
    pinned = pins.get("actor_infer")
    asked = requested.tensor_parallel
    if not job.tensor_parallel_engine:
        if asked is not None and asked > 1:
            raise UsageError(
                f"devices.tensor_parallel is {asked}, but the embedded engine uses one device: set "
                "engine.kind=sglang."
            )
        return [1]
    if asked is not None and heads % asked:
        raise UsageError(
            f"devices.tensor_parallel is {asked}, which does not divide the {heads} heads of "
            f"{job.actor.name}."
        )
    if asked is not None and pinned is not None and len(pinned) % asked:
        raise UsageError(
            f"devices.tensor_parallel is {asked}, which does not divide the {len(pinned)} devices of "
            "devices.actor_infer."
        )
    most = len(pinned) if pinned is not None else count
    if asked is not None:
        return [asked] if asked <= most else []
    able = [
        size
        for size in (1, 2, 4, 8, 16, 32, 64)
        if size <= min(most, MAX_TENSOR_PARALLEL) and not heads % size
    ]
    return able if pinned is None else [size for size in able if not len(pinned) % size]


def _pairs(
    site: Site, pool: Numbers, size: int, pins: Mapping[Role, Numbers]
) -> Iterator[tuple[Layout, Numbers, Numbers]]:
    """Yield (layout, training devices, inference devices)."""
    train, infer = pins.get("actor_train"), pins.get("actor_infer")
    if train is not None and infer is not None:
        yield layout_of(train, infer), train, infer
    elif train is not None:
        rest = tuple(number for number in pool if number not in set(train))
        if site.engines(train, size) == train:
            yield "colocated", train, train
        yield "split", train, site.engines(rest, size)
        wide = site.engines(train, size) + site.engines(rest, size)
        if set(train) < set(wide):
            yield "overlapping", train, wide  # this order keeps engines whole
    elif infer is not None:
        yield "colocated", infer, infer
        yield "split", tuple(number for number in pool if number not in set(infer)), infer
        for cut in _cuts(site, infer, size):
            if cut % size == 0:
                yield "overlapping", infer[:cut], infer
    else:
        whole = site.engines(pool, size)
        yield "colocated", whole, whole
        for cut in _cuts(site, pool, size):
            yield "split", pool[:cut], site.engines(pool[cut:], size)
        for cut in _cuts(site, whole, size):
            if cut % size == 0:
                yield "overlapping", whole[:cut], whole


def _cuts(site: Site, pool: Numbers, size: int) -> list[int]:
    """Return possible numbers of training devices: in steps of devices on few nodes, else of nodes."""
    nodes = [len(node) for node in site.nodes_of(pool).values()]
    ends = [sum(nodes[: at + 1]) for at in range(len(nodes))]
    if len(nodes) < 4:
        ends = list(range(1, len(pool) + 1))
    count = len(ends)
    each = max(1, len(pool) // count)
    # Number of units, counted from the end, that generate: all values if few, a sample if many.
    last = {*range(1, 17 if count <= 32 else 3), -(-size // each)}
    last |= {round(count * part / 16) for part in range(1, 16)}
    if count > 32:  # powers of two train: meshes of copies need numbers that divide
        last |= {count - 2**power for power in range(3, count.bit_length())}
    return sorted({ends[count - 1 - units] for units in last if 0 < units < count})
