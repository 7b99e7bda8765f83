"""Trust rules: reading a run, suite, config or model of unknown origin runs none of its code.

Files name environments by registered ids. Modules to import, and ``module:Class`` names, come from the
command line (``--env-module``) or from a config that the user trains with, and never from a run folder.
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

from rollgym.core.env_prefixes import find_prefix
from rollgym.core.errors import UsageError
from rollgym.core.files import read_bounded

_KINDS = ("train", "sft", "dpo", "eval", "bench", "serve")
_MOST_MANIFEST = 4_000_000
WEAK_SANDBOX = "--allow-weak-sandbox"
"""The command line option that accepts sandbox settings of files even where they weaken the sandbox."""


def run_folder_of(path: Path) -> Path | None:
    """The run folder that a path is, or is inside of."""
    path = path.resolve()
    return next((folder for folder in (path, *path.parents) if _is_run_folder(folder)), None)


def _is_run_folder(folder: Path) -> bool:
    if (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").is_file():
        return True
    try:
        manifest = json.loads(read_bounded(folder / "manifest.json", _MOST_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and "schema" in manifest and manifest.get("kind") in _KINDS


def find_origin(name: str, flag: str) -> str:
    """The file of a module that the user named, without running it; `UsageError` if it must not be imported.

    The current folder is searched last, unless it is inside a run folder. Only parent packages of a dotted
    name are imported.
    """
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UsageError(f"{flag} {name}: not a module name; expected identifiers separated by dots.")
    origin = ""
    for length in range(1, len(parts) + 1):
        part = ".".join(parts[:length])
        spec = _find(part) or (_find_here(part) if length == 1 else None)
        if spec is None:
            break  # the import itself reports what is missing
        origins = [spec.origin] if spec.has_location and spec.origin else []
        for path in (*origins, *(spec.submodule_search_locations or ())):
            folder = run_folder_of(Path(path))
            if folder is not None:
                raise UsageError(
                    f"{flag} {name}: {path} is inside the run folder {folder}, and code is never imported "
                    "from run folders. Move the module out of it."
                )
        origin = origins[0] if origins else ""
    return origin


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):  # a parent is missing, or a module without a spec
        return None


def _find_here(name: str) -> ModuleSpec | None:
    """Append the current folder to the path for a module that is found nowhere else."""
    here = os.getcwd()
    if here in sys.path or run_folder_of(Path(here)) is not None:
        return None
    sys.path.append(here)
    importlib.invalidate_caches()
    spec = _find(name)
    if spec is None:
        sys.path.remove(here)
    return spec


def check_recorded_env(
    env_id: str, env_kwargs: Mapping[str, Any], *, modules: Collection[str] = (), weak_sandbox: bool = False
) -> None:
    """Refuse an environment that a file names unless it is registered and sandboxed at least as by default.

    Args:
        env_id: The name in the file; ``module:Class`` only where the user named that module.
        env_kwargs: The arguments in the file.
        modules: Modules that the user named with ``--env-module``, already imported.
        weak_sandbox: True where the user accepts sandbox settings of the file that weaken the sandbox.
    """
    from rollgym.core.registry import is_registered, unknown_environment

    if not is_registered(env_id):
        module, colon, rest = env_id.partition(":")
        if not colon:
            unknown_environment(env_id)
        prefix = find_prefix(env_id)
        if prefix is not None:
            module = prefix.entry_point.partition(":")[0]
        if module not in modules:
            kind, refused = ("code or an address", "opened") if prefix else ("code", "imported")
            raise UsageError(
                f"The file names the environment {env_id!r}, which is {kind} and not a registered id, so it "
                f"is not {refused}. If you trust the {'address or module' if prefix else 'module'}, pass "
                f"--env-module {module}"
            )
        if prefix is None and not is_registered(rest):
            maker = vars(importlib.import_module(module)).get(rest)
            if not callable(maker) or getattr(maker, "__module__", None) != module:
                raise UsageError(
                    f"The file names the environment {env_id!r}, but {module} defines no class or function "
                    f"{rest!r}."
                )
    for key, value in named_code(env_kwargs):
        if value.partition(":")[0] not in modules:
            raise UsageError(
                f"The file sets {key}={value!r} for {env_id}, which is code, so it is not imported. If "
                f"you trust the module, pass --env-module {value.partition(':')[0]}"
            )
    weaker = [] if weak_sandbox else weakened(env_kwargs.get("sandbox"))
    images = env_kwargs.get("images", "none")
    if images != "none" and not weak_sandbox:  # a container image, perhaps built from a folder of the file
        weaker.append(f"images={images!r}")
    if weaker:
        raise UsageError(
            f"The file sets a weaker sandbox for {env_id} ({', '.join(weaker)}), which is refused: pass "
            f"{WEAK_SANDBOX} to accept it."
        )


def named_code(env_kwargs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The arguments of an environment that name code to import (``judge=module:function``)."""
    value = env_kwargs.get("judge")
    return [("judge", value)] if isinstance(value, str) and ":" in value else []


def check_model_folder(folder: Path) -> None:
    """Refuse a model whose config.json names a kernel from a hub: loading it would run downloaded code."""
    try:
        config = json.loads(read_bounded(folder / "config.json", _MOST_MANIFEST))
    except (OSError, ValueError, RecursionError):
        return  # loading the model reports what is wrong
    kernel = next(_kernels(config), None)
    if kernel is not None:
        raise UsageError(
            f"The model in {folder} names the kernel {kernel!r} on a hub, which is code: remove "
            "attn_implementation from its config.json."
        )


def _kernels(config: Any, depth: int = 0) -> Iterator[str]:
    for key, value in config.items() if isinstance(config, dict) else ():
        if str(key).endswith("_implementation") and "/" in str(value):
            yield str(value)
        elif depth < 8:
            yield from _kernels(value, depth + 1)


def weakened(sandbox: Any) -> list[str]:
    """The sandbox settings that weaken isolation, or bring outside code into the sandbox."""
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
