"""Device inventory: real devices, CPU slots or a described cluster, and the table of known devices.

Memory of known devices is as reported by the driver, peak rates as published by the vendor.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollgym.core.errors import MissingExtra, UnknownName, UsageError
from rollgym.devices.types import Cluster, Node

MIB = 2**20
GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """A model of accelerator."""

    name: str
    memory: int
    """Bytes as shown by ``nvidia-smi``, which can be less than the nominal size."""
    flops: float
    """Dense bfloat16 FLOP/s (float16 on Volta)."""
    bandwidth: float
    """Memory bandwidth, bytes per second."""
    link: float
    """Bytes per second to another device of the node, one way: half of NVLink's advertised rate."""
    source: str


def _gpu(name: str, mib: int, tflops: float, gbs: float, link: float, source: str) -> DeviceModel:
    return DeviceModel(
        name=name, memory=mib * MIB, flops=tflops * 1e12, bandwidth=gbs * GB, link=link * GB, source=source
    )


_SHEET = "NVIDIA data sheet"
DEVICE_MODELS: Mapping[str, DeviceModel] = {
    model.name: model
    for model in (
        _gpu("B200", 183359, 2250, 8000, 900, f"{_SHEET} of DGX B200, an eighth of it"),
        _gpu("H200", 143771, 989, 4800, 450, f"{_SHEET} of H200 SXM"),
        _gpu("H100", 81559, 989, 3350, 450, f"{_SHEET} of H100 SXM5"),
        _gpu("H20", 97871, 148, 4000, 450, f"{_SHEET} of HGX H20"),
        _gpu("A100-80", 81920, 312, 2039, 300, f"{_SHEET} of A100 80GB SXM4"),
        _gpu("A100-40", 40960, 312, 1555, 300, f"{_SHEET} of A100 40GB SXM4"),
        _gpu("V100-32", 32768, 125, 900, 150, f"{_SHEET} of V100 SXM2"),
        _gpu("L40S", 46068, 362, 864, 25, f"{_SHEET} of L40S; PCIe 4"),
        _gpu("A10", 23028, 125, 600, 25, f"{_SHEET} of A10; PCIe 4"),
        _gpu("RTX4090", 24564, 165, 1008, 25, "NVIDIA Ada GPU architecture paper; PCIe 4"),
    )
}
"""By name; `device_model` also accepts aliases such as 4090 and A100."""
_ALSO = {
    "4090": "RTX4090",
    "A100": "A100-80",
    "A100-80GB": "A100-80",
    "A100-40GB": "A100-40",
    "V100": "V100-32",
}

NETWORK = 50 * GB
"""Default bytes per second between nodes for each device: one 400 Gbit/s port each."""
HOST_SHARE = 2
"""Default host memory, as a multiple of the memory of the node's devices (DGX H100: 3.2)."""
CPU_FLOPS = 8e10
"""float32 FLOP/s of one core: 2 x 8 lanes x 2 for fused multiply-add at 2.5 GHz (AVX2)."""
CPU_BANDWIDTH = 1e10
"""Memory bandwidth per core, bytes per second."""


def device_model(name: str) -> DeviceModel:
    """Return a known device by its name."""
    model = DEVICE_MODELS.get(_ALSO.get(name.upper(), name.upper()))
    if model is None:
        raise UnknownName(
            "device model", name, DEVICE_MODELS, f"Known: {', '.join(DEVICE_MODELS)}; set memory for others."
        )
    return model


_CPU = re.compile(r"cpu:([0-9]{1,4})", re.ASCII)
_GPUS = re.compile(r"(?:([0-9]{1,5})x)?([0-9]{1,3})x([A-Za-z][\w-]*|4090)", re.ASCII)


def find_cluster(words: str | None = None) -> Cluster:
    """Return the cluster for a ``--cluster`` argument.

    Args:
        words: None (the CUDA devices of this machine, or else two CPU slots), ``cuda``, ``cpu:4``, ``8xH100``
            or ``32x8xH100`` (nodes x devices), or a YAML file.
    """
    if words is None:
        return cuda_cluster() or cpu_cluster(2)
    if words == "cuda":
        cluster = cuda_cluster()
        if cluster is None:
            raise UsageError("No CUDA device found (or torch without CUDA); use cpu:2 to plan for the CPU.")
        return cluster
    if match := _CPU.fullmatch(words):
        return cpu_cluster(int(match[1]))
    if (match := _GPUS.fullmatch(words)) and not Path(words).exists():
        return gpu_cluster(nodes=int(match[1] or 1), gpus=int(match[2]), model=match[3])
    return read_cluster(Path(words))


def cpu_cluster(slots: int) -> Cluster:
    """Return this machine with its CPUs and memory split into equal slots."""
    if slots < 1:
        raise UsageError(f"cpu:{slots} has no slots: at least 1 is needed.")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Cluster((cpu_node("this machine", slots, cores, memory),))


def cuda_cluster() -> Cluster | None:
    """Return this machine with its CUDA devices; None without any. Imports torch."""
    try:
        torch: Any = importlib.import_module("torch")
    except ModuleNotFoundError:
        return None
    if not torch.cuda.is_available():
        return None
    facts = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    least = min(int(fact.total_memory) for fact in facts)
    node = _node("this machine", len(facts), known_model(facts[0].name, least))
    node = replace(node, model=facts[0].name, memory=least, host_memory=host, cpus=os.cpu_count() or 0)
    return Cluster((node,))


def gpu_cluster(*, nodes: int = 1, gpus: int, model: str) -> Cluster:
    """Return equal nodes of a known device, with default network and host memory."""
    if nodes < 1 or gpus < 1:
        raise UsageError("A cluster needs at least 1 node with at least 1 device.")
    node = _node("node", gpus, device_model(model))
    return Cluster(tuple(replace(node, name=f"node{at}") for at in range(nodes)))


def read_cluster(path: Path) -> Cluster:
    """Read a cluster from a YAML file."""
    if not path.is_file():
        raise UsageError(
            f"Cluster file {path} not found; --cluster also takes cpu:2, 8xH100 or 32x8xH100 "
            f"(devices: {', '.join(DEVICE_MODELS)})."
        )
    try:
        from rollgym.devices.cluster_file import load_cluster
    except ModuleNotFoundError as error:
        if error.name not in ("pydantic", "yaml"):
            raise
        raise MissingExtra("Reading a cluster file", "train") from error
    return load_cluster(path)


def cluster_from_nodes(nodes: Iterable[tuple[str, float, float, float]], *, model: str = "") -> Cluster:
    """Return a cluster from (name, GPUs, CPUs, bytes of memory) of each node, as reported by Ray.

    Ray reports the number of GPUs, not their model: pass it as ``model``. Without it they are logical GPUs,
    each a share of its node's CPUs and memory. Nodes without GPUs have one CPU slot.
    """
    result: list[Node] = []
    for name, gpus, cpus, memory in nodes:
        count, cores = int(gpus), int(cpus)
        if not count:
            result.append(cpu_node(name, 1, cores, int(memory)))
        elif model:
            node = _node(name, count, device_model(model))
            result.append(replace(node, cpus=cores, host_memory=int(memory)))
        else:
            result.append(replace(cpu_node(name, count, cores, int(memory)), kind="gpu", model="logical"))
    return Cluster(gpus_first(result))


def known_model(name: str, memory: int) -> DeviceModel | None:
    """Return the known device for a driver's name, such as ``NVIDIA A100-SXM4-40GB``."""
    words = re.sub(r"[^A-Z0-9]", " ", name.upper()).replace("RTX ", "RTX").split()
    near = [m for m in DEVICE_MODELS.values() if m.name.split("-")[0] in words]
    near = [m for m in near if 0.85 < memory / m.memory < 1.15]
    return near[0] if near else None


def gpus_first(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Sort nodes with GPUs first: models are placed on those only, so their numbers start at 0."""
    return tuple(sorted(nodes, key=lambda node: node.kind != "gpu"))


def _node(name: str, gpus: int, model: DeviceModel | None) -> Node:
    if model is None:
        return Node(name=name, devices=gpus, memory=16_384 * MIB)
    return Node(
        name=name,
        devices=gpus,
        memory=model.memory,
        model=model.name,
        flops=model.flops,
        bandwidth=model.bandwidth,
        link=model.link,
        network=min(NETWORK, model.link),
        host_memory=HOST_SHARE * gpus * model.memory,
        cpus=16 * gpus,
    )


def cpu_node(name: str, slots: int, cores: int, memory: int) -> Node:
    """Return a node whose cores and memory are divided into slots."""
    share = max(cores / slots, 0.25)
    return Node(
        name=name,
        kind="cpu",
        devices=slots,
        memory=memory // slots,
        model="cores",
        flops=CPU_FLOPS * share,
        bandwidth=CPU_BANDWIDTH * share,
        link=CPU_BANDWIDTH / 2,
        network=1e9,
        host_memory=memory,
        cpus=cores,
    )
