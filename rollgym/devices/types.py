"""What a plan is made of: devices, wishes, and who works where. No library but Python's own is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollgym.errors import UsageError

DeviceKind = Literal["gpu", "cpu"]
Layout = Literal["colocated", "split", "overlapping"]
Role = Literal["actor_train", "actor_infer", "critic", "reference", "reward", "envs"]

ROLES: tuple[Role, ...] = ("actor_train", "actor_infer", "critic", "reference", "reward", "envs")
MODEL_ROLES: tuple[Role, ...] = ROLES[:-1]
"""Those that hold a model on a device; environments take processors only."""


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One accelerator, or one slot of processor cores where there is none."""

    node: int
    """Which node of the cluster."""
    index: int
    """Which device of that node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine."""

    name: str
    kind: DeviceKind = "gpu"
    devices: int
    """How many GPUs, or how many slots its processors are cut into."""
    memory: int
    """Bytes of each device; of a slot, its share of the machine's."""
    model: str = ""
    """What the device is called, such as ``H100``."""
    flops: float = 0.0
    """Of one device, dense, in the precision that is trained in; 0: unknown."""
    bandwidth: float = 0.0
    """Bytes a second of one device's own memory; 0: unknown."""
    link: float = 0.0
    """Bytes a second between two devices of the node; 0: unknown."""
    network: float = 0.0
    """Bytes a second between one device of the node and one of another; 0: unknown."""
    host_memory: int = 0
    """Bytes of the machine, for what is offloaded."""
    cpus: int = 0


@dataclass(frozen=True, slots=True)
class Cluster:
    """All machines there are."""

    nodes: tuple[Node, ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, node by node: their position here is their number in ``gpu[0-3]``."""
        return tuple(Device(at, index) for at, node in enumerate(self.nodes) for index in range(node.devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWishes:
    """What a configuration asks for; whatever is left open is chosen.

    Devices are written ``gpu[0-3]``, ``gpu[0,2,4-7]`` or ``cpu[0-1]``: numbers over the whole cluster.
    """

    layout: Literal["auto", "colocated", "split", "overlapping"] = "auto"
    actor_train: str | None = None
    actor_infer: str | None = None
    critic: str | None = None
    reference: str | None = None
    reward: str | None = None
    tensor_parallel: int | None = None
    """Devices that hold one copy of the policy together when it generates."""
    offload: Literal["auto", "none", "optimiser", "all"] = "auto"
    """What leaves a device that training and generating share while the other has it: nothing; the optimiser
    and the KV cache; everything. ``auto``: as little as lets the run fit."""
    when_lost: Literal["replan", "wait"] = "replan"
    """After the learner lost a node: go on with what is left, or wait until there is as much as before."""

    def __post_init__(self) -> None:
        if self.tensor_parallel is not None and self.tensor_parallel < 1:
            raise UsageError(f"devices.tensor_parallel must be at least 1, not {self.tensor_parallel}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one role works, and how its model is cut up there."""

    role: Role
    devices: tuple[Device, ...]
    tensor_parallel: int = 1
    data_parallel: int = 1
    """Copies that work on different parts of the data; times ``tensor_parallel``, the number of devices."""
    sharding: Literal["none", "optimiser", "gradients", "weights"] = "none"
    """What the data-parallel ranks of training hold a part of only: ZeRO 0, 1, 2 or 3."""
    offload: tuple[str, ...] = ()
    """What moves to the host's memory while another role has the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who works where: what a runtime needs to know. `planner` adds memory, a timeline and reasons."""

    cluster: Cluster
    layout: Layout
    placements: Mapping[Role, Placement] = field(default_factory=dict)

    def sharing(self) -> tuple[Device, ...]:
        """The devices that training and inference take turns on."""
        train, infer = self.placements.get("actor_train"), self.placements.get("actor_infer")
        if train is None or infer is None:
            return ()
        return tuple(device for device in infer.devices if device in train.devices)
