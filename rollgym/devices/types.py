"""Types of a plan: cluster, devices, requested settings and placements. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollgym.core.errors import UsageError

DeviceKind = Literal["gpu", "cpu"]
Layout = Literal["colocated", "split", "overlapping"]
Role = Literal["actor_train", "actor_infer", "critic", "reference", "reward", "envs"]

ROLES: tuple[Role, ...] = ("actor_train", "actor_infer", "critic", "reference", "reward", "envs")
MODEL_ROLES: tuple[Role, ...] = ROLES[:-1]
"""Roles with a model on a device; environments only use CPUs."""


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One accelerator, or one slot of CPU cores on a machine without any."""

    node: int
    """Index of the node in the cluster."""
    index: int
    """Index of the device in the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine."""

    name: str
    kind: DeviceKind = "gpu"
    devices: int
    """Number of GPUs, or of CPU slots."""
    memory: int
    """Bytes of each device; for a slot, its share of the machine's memory."""
    model: str = ""
    """Name of the device model, such as ``H100``."""
    flops: float = 0.0
    """Dense FLOP/s of one device in the training precision; 0: unknown."""
    bandwidth: float = 0.0
    """Memory bandwidth of one device, bytes per second; 0: unknown."""
    link: float = 0.0
    """Bytes per second between two devices of the node; 0: unknown."""
    network: float = 0.0
    """Bytes per second between a device of the node and one of another node; 0: unknown."""
    host_memory: int = 0
    """Bytes of host memory, for offloading."""
    cpus: int = 0


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes of a cluster."""

    nodes: tuple[Node, ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, node by node: the position is the number in ``gpu[0-3]``."""
        return tuple(Device(at, index) for at, node in enumerate(self.nodes) for index in range(node.devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMesh:
    """Dimensions of the mesh of training ranks, as in ``learner.parallel``; their product is the ranks."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicate * self.copy_ranks

    @property
    def copy_ranks(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.shard * self.context * self.tensor * self.expert

    @property
    def model_ranks(self) -> int:
        """Ranks that compute the same rows together."""
        return self.context * self.tensor

    @property
    def data_ranks(self) -> int:
        """Sets of ranks that compute different rows."""
        return self.replicate * self.shard * self.expert

    @property
    def shards(self) -> int:
        """Ranks that FSDP2 shards all parameters over but experts of an expert parallel model."""
        return self.shard * self.context * self.expert

    @property
    def expert_shards(self) -> int:
        """Ranks that FSDP2 shards the experts of a rank over."""
        return self.shard * self.context

    @property
    def plain(self) -> bool:
        """Whether all ranks shard, so that no mesh is needed."""
        return self.ranks == self.shard

    def __str__(self) -> str:
        """Return the dimensions above 1, such as ``shard 32 x tensor 8``."""
        sizes = {name: getattr(self, name) for name in ("replicate", "shard", "context", "tensor", "expert")}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshRequest:
    """The setting ``learner.parallel``."""

    replicate: int = 1
    shard: int | None = None
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def resolve(self, ranks: int) -> TrainMesh | None:
        """Return the mesh of a number of ranks; ``None`` if its dimensions do not fit them."""
        rest = self.replicate * self.context * self.tensor * self.expert
        shard = ranks // rest if self.shard is None else self.shard
        if shard * rest != ranks:
            return None
        return TrainMesh(
            replicate=self.replicate,
            shard=shard,
            context=self.context,
            tensor=self.tensor,
            expert=self.expert,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The ``devices`` section of a config; settings that are left open are chosen by the planner.

    Devices are written as ``gpu[0-3]``, ``gpu[0,2,4-7]`` or ``cpu[0-1]``, numbered over the whole cluster.
    """

    layout: Literal["auto", "colocated", "split", "overlapping"] = "auto"
    actor_train: str | None = None
    actor_infer: str | None = None
    critic: str | None = None
    reference: str | None = None
    reward: str | None = None
    tensor_parallel: int | None = None
    """Devices per inference engine."""
    offload: Literal["auto", "none", "optimizer", "all"] = "auto"
    """Idle state that is offloaded from devices shared by training and generation: none, the optimizer state
    and KV cache, or all. ``auto``: as little as lets the run fit."""
    when_lost: Literal["replan", "wait"] = "replan"
    """After the learner lost a node: continue on the remaining devices, or wait for replacements."""

    def __post_init__(self) -> None:
        if self.tensor_parallel is not None and self.tensor_parallel < 1:
            raise UsageError(f"devices.tensor_parallel must be at least 1, not {self.tensor_parallel}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The devices of one role, and how its model is parallelized."""

    role: Role
    devices: tuple[Device, ...]
    tensor_parallel: int = 1
    data_parallel: int = 1
    """Number of copies of the model; times ``tensor_parallel``, the number of devices."""
    sharding: Literal["none", "optimizer", "gradients", "weights"] = "none"
    """State that is sharded over the data-parallel ranks: ZeRO stage 0, 1, 2 or 3."""
    offload: tuple[str, ...] = ()
    """State that is offloaded to host memory while another role uses the devices."""
    mesh: TrainMesh | None = None
    """Mesh of the ranks of the ``mesh`` strategy; ``None``: all of them shard, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The placement of all roles. `PlanReport` adds memory, a timeline and reasons."""

    cluster: Cluster
    layout: Layout
    placements: Mapping[Role, Placement] = field(default_factory=dict)

    def sharing(self) -> tuple[Device, ...]:
        """Return the devices shared by training and inference."""
        train, infer = self.placements.get("actor_train"), self.placements.get("actor_infer")
        if train is None or infer is None:
            return ()
        return tuple(device for device in infer.devices if device in train.devices)
