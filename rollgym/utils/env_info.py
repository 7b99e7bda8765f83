"""Software versions and CPU of a result."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from rollgym.core.env_prefixes import find_prefix
from rollgym.core.registry import find_spec

_FEATURES = (
    "avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16",
)  # fmt: skip
_ALWAYS = ("rollgym", "gymnasium", "numpy")


def package_versions(env_id: str) -> dict[str, str]:
    """Return the versions of Python, rollgym's base and the package of the environment."""
    versions = {"python": platform.python_version(), "platform": platform.platform(terse=True), "cpu": cpu()}
    for name in (*_ALWAYS, *_origin(env_id)):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


@functools.cache
def cpu() -> str:
    """Return the CPU model and the features by which numeric libraries choose kernels.

    The same seed gives the same floating-point numbers only where these and the versions are equal.
    """
    model, flags = platform.machine(), set[str]()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
    return " ".join([model, *(feature for feature in _FEATURES if feature in flags)])


def _origin(env_id: str) -> list[str]:
    if prefix := find_prefix(env_id):
        return [prefix.package]
    entry = find_spec(env_id).entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    top = module.partition(":")[0].partition(".")[0]
    return sorted(_distributions().get(top, []))


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Return which packages provide which modules, cached: reading their metadata takes 0.25 s."""
    return packages_distributions()
