"""Known devices: memory as reported by the driver, peak rates as published by the vendor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollgym.core.errors import UnknownName

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
        name=name,
        memory=mib * MIB,
        flops=tflops * 1e12,
        bandwidth=gbs * GB,
        link=link * GB,
        source=source,
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
    found = DEVICE_MODELS.get(_ALSO.get(name.upper(), name.upper()))
    if found is None:
        raise UnknownName(
            "device model", name, DEVICE_MODELS, f"Known: {', '.join(DEVICE_MODELS)}; set memory for others."
        )
    return found
