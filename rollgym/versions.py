"""Which software made a result, and on which CPU."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from rollgym.registry import find_spec

_FEATURES = (
    "avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16",
)  # fmt: skip
_ALWAYS = ("rollgym", "gymnasium", "numpy")


def package_versions(env_id: str) -> dict[str, str]:
    """Versions of Python, of rollgym's base and of the package the environment comes from."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True), "cpu": cpu()}
    for name in (*_ALWAYS, *_origin(env_id)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def cpu() -> str:
    """The CPU's model and those of its features that numeric libraries choose kernels by.

    The same seed gives the same floating-point numbers only where these and the versions are the same.
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
    entry = find_spec(env_id).entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    top = module.partition(":")[0].partition(".")[0]
    return sorted(_distributions().get(top, []))


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Which packages bring which modules. Reading all of their metadata takes a quarter of a second."""
    return packages_distributions()
