"""Which software made a result."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from rollgym.registry import find_spec

_ALWAYS = ("rollgym", "gymnasium", "numpy")


def package_versions(env_id: str) -> dict[str, str]:
    """Versions of Python, of rollgym's base and of the package the environment comes from."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for name in (*_ALWAYS, *_origin(env_id)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _origin(env_id: str) -> list[str]:
    entry = find_spec(env_id).entry_point
    module = entry if isinstance(entry, str) else getattr(entry, "__module__", "")
    top = module.partition(":")[0].partition(".")[0]
    return sorted(_distributions().get(top, []))


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Which packages bring which modules. Reading all of their metadata takes a quarter of a second."""
    return packages_distributions()
