"""Stands in for the wheel `sgl-kernel` where its compiled parts cannot be loaded (no GPU).

SGLang imports names from it when it starts, and on a CPU then computes with torch instead. So every name
can be imported, from any submodule, and whatever is called says that it is not there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0+stand.in"
__path__: list[str] = []  # so that it counts as a package


class Missing:
    """A name that can be imported and passed around, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        return _missing(self._name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not available without sgl-kernel")


def _missing(parent: str, name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{parent}.{name}")


def __getattr__(name: str) -> Missing:
    return _missing(__name__, name)


class Submodules(MetaPathFinder, Loader):
    """Makes ``sgl_kernel.anything`` importable."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        parent = module.__name__

        def lookup(name: str) -> Missing:
            return _missing(parent, name)

        module.__dict__["__getattr__"] = lookup


sys.meta_path.append(Submodules())
