"""The plan report: the plan with memory, timeline, reasons and alternatives."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rollgym.devices.cost_model import Offload, Span
from rollgym.devices.memory import Part, Sharding
from rollgym.devices.ranges import format_range
from rollgym.devices.types import Cluster, Device, Plan, Role
from rollgym.devices.workload import Job

ZERO: dict[Sharding, str] = {
    "none": "no sharding",
    "optimizer": "ZeRO-1",
    "gradients": "ZeRO-2",
    "weights": "ZeRO-3",
}
OFFLOAD_TEXT: dict[Offload, str] = {
    "none": "nothing is offloaded",
    "optimizer": "idle optimizer state and KV cache are offloaded",
    "all": "all idle state is offloaded",
    "host": "all idle state is offloaded, and the optimizer steps on the host",
}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of each device of a group in one phase."""

    phase: str
    devices: tuple[Device, ...]
    parts: tuple[tuple[Role, Part, int], ...]
    limit: int
    """Usable bytes."""
    capacity: int
    """Total bytes."""

    @property
    def used(self) -> int:
        """Bytes of all parts."""
        return sum(size for _, _, size in self.parts)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a choice was made, or rejected."""

    about: str
    """``layout``, ``tensor_parallel``, ``sharding``, ``mesh`` or ``offload``."""
    choice: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A `Plan` with its explanation."""

    plan: Plan
    job: Job
    sharding: Sharding
    offload: Offload
    memory: tuple[DeviceMemory, ...]
    timeline: tuple[Span, ...]
    seconds: float
    """Approximate duration of one step."""
    kv_tokens: int
    """Tokens in the KV cache of one engine."""
    reasons: tuple[Reason, ...]
    alternatives: tuple[Reason, ...]
    notes: tuple[str, ...] = ()
    tried: int = 0
    """Number of candidates evaluated."""

    def used(self, device: Device, phase: str) -> int:
        """Return the bytes on a device in a phase."""
        return sum(
            memory.used for memory in self.memory if memory.phase == phase and device in memory.devices
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON types; devices as ranges."""
        cluster = self.plan.cluster
        return {
            "kind": "plan",
            "cluster": {
                "nodes": len(cluster.nodes),
                "devices": len(cluster.devices),
                "words": describe(cluster),
            },
            "layout": self.plan.layout,
            "placements": {role: self._placement(role) for role in self.plan.placements},
            "memory": [
                {
                    "phase": use.phase,
                    "devices": format_range(use.devices, cluster),
                    "parts": [{"role": role, "part": part, "bytes": size} for role, part, size in use.parts],
                    "used": use.used,
                    "limit": use.limit,
                }
                for use in self.memory
            ],
            "timeline": [asdict(span) for span in self.timeline],
            "step_seconds": self.seconds,
            "kv_tokens": self.kv_tokens,
            "reasons": [asdict(reason) for reason in self.reasons],
            "alternatives": [asdict(reason) for reason in self.alternatives],
            "notes": list(self.notes),
            "tried": self.tried,
        }

    def _placement(self, role: Role) -> dict[str, Any]:
        placement = self.plan.placements[role]
        return {
            "devices": format_range(placement.devices, self.plan.cluster),
            "model": self.job.models()[role].name,
            "tensor_parallel": placement.tensor_parallel,
            "data_parallel": placement.data_parallel,
            "sharding": placement.sharding,
            "mesh": None if placement.mesh is None else asdict(placement.mesh),
            "offload": list(placement.offload),
        }


def size_text(size: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError


def time_text(seconds: float) -> str:
    """Format a duration."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def count_text(number: float) -> str:
    """Format a number of parameters."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def describe(cluster: Cluster) -> str:
    """Describe a cluster, such as ``32 nodes x 8 H100 (79.6 GiB)``."""
    texts = []
    kinds = Counter((node.kind, node.devices, node.model, node.memory) for node in cluster.nodes)
    for (kind, devices, model, memory), count in kinds.items():
        nodes = f"{count} nodes x " if count > 1 else ""
        name = f"cpu slot{'s' if devices > 1 else ''}" if kind == "cpu" else model or "GPU"
        texts.append(f"{nodes}{devices} {name} ({size_text(memory)})")
    return ", ".join(texts)
