"""What files may name. Reading a run, result, suite, config or model of others runs none of their code.

Files name environments by registered ids. Modules to import, and ``module:Class`` names, come from the
command line (``--env-module``) or from a config that the user trains with, and never lie in a run's folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from rollgym.errors import UsageError
from rollgym.files import read_bounded

_KINDS = ("train", "eval", "bench", "serve")
_MOST_MANIFEST = 4_000_000
WEAK_SANDBOX = "--allow-weak-sandbox"
"""The option of commands that honors sandbox settings from files, even where they weaken the walls."""


def run_folder_of(path: Path) -> Path | None:
    """The run folder in which a path lies, or that it is."""
    path = path.resolve()
    return next((folder for folder in (path, *path.parents) if _is_run_folder(folder)), None)


def _is_run_folder(folder: Path) -> bool:
    if (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").is_file():
        return True
    try:
        said = json.loads(read_bounded(folder / "manifest.json", _MOST_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(said, dict) and "schema" in said and said.get("kind") in _KINDS


def find_origin(name: str, flag: str) -> str:
    """Where a module that the user named lies, without running it; `UsageError` if it must not be imported.

    The current folder is searched last, unless it lies in a run's folder. Only packages above a dotted name
    are imported on the way.
    """
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UsageError(f"{flag} {name}: a module is named by words with dots between them.")
    origin = ""
    for length in range(1, len(parts) + 1):
        part = ".".join(parts[:length])
        spec = _find(part) or (_find_here(part) if length == 1 else None)
        if spec is None:
            break  # the import itself says what is missing
        places = [spec.origin] if spec.has_location and spec.origin else []
        for place in (*places, *(spec.submodule_search_locations or ())):
            folder = run_folder_of(Path(place))
            if folder is not None:
                raise UsageError(
                    f"{flag} {name}: {place} lies in the run's folder {folder}, and no code is imported from "
                    "there. Move the module out of it."
                )
        origin = places[0] if places else ""
    return origin


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):  # a parent is missing, or a module was put in place by hand
        return None


def _find_here(name: str) -> ModuleSpec | None:
    """Take the current folder onto the path, at its end, for a module that is nowhere else."""
    here = os.getcwd()
    if here in sys.path or run_folder_of(Path(here)) is not None:
        return None
    sys.path.append(here)
    importlib.invalidate_caches()
    found = _find(name)
    if found is None:
        sys.path.remove(here)
    return found


def check_recorded_env(
    env_id: str, env_kwargs: Mapping[str, Any], *, modules: Collection[str] = (), weak_sandbox: bool = False
) -> None:
    """Refuse an environment that a file names unless it is registered and as well walled as by default.

    Args:
        env_id: The name in the file. ``module:Class`` only where the user named that module himself.
        env_kwargs: The arguments in the file.
        modules: What the user named with ``--env-module``, imported already.
        weak_sandbox: Whether the user accepts sandbox settings of the file that weaken the walls.
    """
    from rollgym.registry import is_registered, unknown_environment

    if not is_registered(env_id):
        module, colon, rest = env_id.partition(":")
        if not colon:
            unknown_environment(env_id)
        if module not in modules:
            raise UsageError(
                f"The file names the environment {env_id!r}, which is code and not a registered id: it is "
                f"not imported. If you trust the module, name it: --env-module {module}"
            )
        if not is_registered(rest) and getattr(_attribute(module, rest), "__module__", None) != module:
            raise UsageError(
                f"The file names the environment {env_id!r}, but {module} defines no class or function "
                f"{rest!r}."
            )
    weaker = [] if weak_sandbox else weakened(env_kwargs.get("sandbox"))
    if weaker:
        raise UsageError(
            f"The file asks for a weaker sandbox for {env_id} ({', '.join(weaker)}), which is not honored: "
            f"{WEAK_SANDBOX} accepts it."
        )


def check_model_folder(folder: Path) -> None:
    """Refuse a model whose config.json names a kernel from a hub: that is code, and it would run here."""
    try:
        said = json.loads(read_bounded(folder / "config.json", _MOST_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return  # loading the model says what is wrong with it
    named = next(_kernels(said), None)
    if named is not None:
        raise UsageError(
            f"The model in {folder} asks for the kernel {named!r} from a hub, which is code: take "
            "attn_implementation out of its config.json."
        )


def _kernels(said: Any, depth: int = 0) -> Iterator[str]:
    for key, value in said.items() if isinstance(said, dict) else ():
        if str(key).endswith("_implementation") and "/" in str(value):
            yield str(value)
        elif depth < 8:
            yield from _kernels(value, depth + 1)


def _attribute(module: str, name: str) -> object:
    found = vars(importlib.import_module(module)).get(name)
    return found if callable(found) else None


def weakened(sandbox: Any) -> list[str]:
    """The settings among a sandbox's that take walls down, or bring code from outside into it."""
    if not isinstance(sandbox, Mapping):
        return [] if sandbox is None else ["sandbox"]
    safe: Mapping[str, tuple[Any, ...]] = {
        "backend": ("auto", "namespaces", "docker"),
        "minimum": ("namespaces", "NAMESPACES"),
        "allow_unsafe": (False,),
        "preload": ([], ()),
        "image": (None,),
    }
    weak = [name for name in safe if name in sandbox and sandbox[name] not in safe[name]]
    return [f"{name}={sandbox[name]!r}" for name in weak]
