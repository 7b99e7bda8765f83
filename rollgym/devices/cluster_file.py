"""Cluster files: YAML descriptions of clusters, which need not exist.

nodes:
  - count: 32
    gpus: 8
    model: H100        # sets memory, FLOP/s, bandwidth and link
    network: 50 GB/s   # per device
    host_memory: 2 TB
    cpus: 128
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from rollgym.config.loader import Settings, load
from rollgym.core.errors import UsageError
from rollgym.devices.inventory import HOST_SHARE, NETWORK, cpu_node, device_model, gpus_first
from rollgym.devices.types import Cluster, Node

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B(/s)?", re.ASCII)


class NodeGroup(Settings):
    """A group of equal machines."""

    count: int = Field(default=1, ge=1, le=100_000)
    name: str = "node"
    """Name; a number is appended if there are several machines."""
    gpus: int = Field(default=0, ge=0, le=1024)
    """GPUs per machine; 0: CPU only."""
    model: str | None = None
    """A known device, such as H100, A100-80, H200 or L40S."""
    memory: str | None = None
    """Memory of each device, such as 80 GB or 79.6 GiB."""
    tflops: float | None = Field(default=None, gt=0)
    """Dense TFLOP/s of each device in the training precision."""
    bandwidth: str | None = None
    """Memory bandwidth of a device, such as 3350 GB/s."""
    link: str | None = None
    """Bandwidth between two devices of a machine, one way, such as 450 GB/s."""
    network: str | None = None
    """Bandwidth between machines per device, such as 50 GB/s."""
    host_memory: str | None = None
    """Memory of each machine, such as 2 TB."""
    cpus: int | None = Field(default=None, ge=1)
    """CPU cores per machine."""

    def check(self) -> None:
        """Check that the device is known or its memory is given."""
        if self.gpus and self.model is not None:
            device_model(self.model)
        if self.gpus and self.model is None and self.memory is None:
            raise UsageError("a node with GPUs needs model (H100, ...) or memory.")
        if not self.gpus and (self.host_memory is None or self.cpus is None):
            raise UsageError("a node without GPUs needs cpus and host_memory.")
        for key in ("memory", "bandwidth", "link", "network", "host_memory"):
            if (text := getattr(self, key)) is not None:
                size(text, key)


class ClusterFile(Settings):
    """A cluster file."""

    nodes: list[NodeGroup] = Field(min_length=1)


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file; machines with GPUs come first, so their numbers start at 0."""
    groups = load(ClusterFile, path).nodes
    nodes = [_named(group, at) for group in groups for at in range(group.count)]
    seen: dict[str, int] = {}
    for at, node in enumerate(nodes):
        if seen.setdefault(node.name, at) != at:
            raise UsageError(f"{path} has two nodes called {node.name!r}: give their groups different names.")
    return Cluster(gpus_first(nodes))


def size(text: str, key: str) -> int:
    """Parse a size such as ``80 GB`` or a rate such as ``50 GB/s``."""
    match = _SIZE.fullmatch(text.strip())
    rate = key in ("bandwidth", "link", "network")
    if match is None or (match[4] is not None) != rate:
        raise UsageError(f"{key} {text!r} is not a size: write {'50 GB/s' if rate else '80 GB or 80 GiB'}.")
    unit = 1024 ** list(_UNITS).index(match[2]) if match[3] else _UNITS[match[2]]
    number = int(float(match[1]) * unit)
    if not number:
        raise UsageError(f"{key} must be greater than 0.")
    return number


def _named(group: NodeGroup, at: int) -> Node:
    name = group.name if group.count == 1 and group.name != "node" else f"{group.name}{at}"
    return _gpu_node(group, name) if group.gpus else _cpu_node(group, name)


def _gpu_node(group: NodeGroup, name: str) -> Node:
    model = None if group.model is None else device_model(group.model)
    memory = size(group.memory, "memory") if group.memory else model.memory if model else 0
    link = _or(group.link, "link", model.link if model else 0.0)
    return Node(
        name=name,
        devices=group.gpus,
        memory=memory,
        model=group.model or "",
        flops=group.tflops * 1e12 if group.tflops else model.flops if model else 0.0,
        bandwidth=_or(group.bandwidth, "bandwidth", model.bandwidth if model else 0.0),
        link=link,
        network=_or(group.network, "network", min(NETWORK, link or NETWORK)),
        host_memory=int(_or(group.host_memory, "host_memory", HOST_SHARE * group.gpus * memory)),
        cpus=group.cpus or 16 * group.gpus,
    )


def _cpu_node(group: NodeGroup, name: str) -> Node:
    node = cpu_node(name, 1, group.cpus or 1, size(group.host_memory or "", "host_memory"))
    return replace(
        node,
        flops=group.tflops * 1e12 if group.tflops else node.flops,
        bandwidth=_or(group.bandwidth, "bandwidth", node.bandwidth),
        network=_or(group.network, "network", node.network),
    )


def _or(text: str | None, key: str, default: float) -> float:
    return default if text is None else float(size(text, key))
