"""Opens the strongest sandbox available that meets the requested isolation level."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from rollgym.core.errors import RollgymError, RunError, UsageError
from rollgym.sandbox import client
from rollgym.sandbox.client import ENVIRONMENT, WorkerSandbox
from rollgym.sandbox.interpreter import Interpreter
from rollgym.sandbox.landlock import open_landlock
from rollgym.sandbox.launch import PipesWithFolder, boot, make_folder
from rollgym.sandbox.namespaces import HOW_TO_ALLOW, HOW_TO_GET, open_namespaces
from rollgym.sandbox.types import Level, Sandbox, SandboxSettings

WEAKNESSES = ("No isolation: the code has all rights of this process on files, processes and networks.",)


def open_plain(settings: SandboxSettings) -> WorkerSandbox:
    """Start a worker without isolation if allowed."""
    if not settings.allow_unsafe:
        raise UsageError(
            "backend=none runs code with all rights of this process; set allow_unsafe=True to accept it."
        )
    # The Python of this process; no other user has to read it.
    python = Interpreter(sys.executable, (), f"the Python of this process, {sys.version.split()[0]}")
    folder = make_folder(None)
    channel = PipesWithFolder(folder, python.command(settings.preload), uid=None, environment=ENVIRONMENT)
    config = client.worker_config(
        settings.limits,
        confinement="none",
        work=folder,
        scratch=[],
        processes="none",
        preload=list(settings.preload),
    )
    boot(channel, config, python.why)
    return WorkerSandbox(
        channel,
        backend="none",
        level=Level.NONE,
        weaknesses=WEAKNESSES,
        limits=settings.limits,
        python=python.why,
    )


LEVELS = {
    "namespaces": Level.NAMESPACES,
    "docker": Level.NAMESPACES,
    "landlock": Level.LANDLOCK,
    "none": Level.NONE,
}
"""Isolation level of each backend."""
AUTOMATIC = ("namespaces", "landlock")


def open_docker(settings: SandboxSettings) -> Sandbox:
    """Open the ``docker`` backend; its library is imported lazily."""
    sandbox: Sandbox = importlib.import_module("rollgym.sandbox.docker").open_docker(settings)
    return sandbox


OPENERS: dict[str, Callable[[SandboxSettings], Sandbox]] = {
    "namespaces": open_namespaces,
    "landlock": open_landlock,
    "docker": open_docker,
    "none": open_plain,
}


def open_sandbox(settings: SandboxSettings | None = None) -> Sandbox:
    """Open the requested sandbox.

    Raises:
        RunError: It is unavailable; the message gives the reason and the fix.
    """
    settings = settings or SandboxSettings()
    if settings.backend == "auto":
        return _open_automatic(settings)
    if settings.backend not in OPENERS:
        names = ", ".join(["auto", *OPENERS])
        raise UsageError(f"Unknown sandbox backend {settings.backend!r}; choose one of {names}.")
    level = LEVELS[settings.backend]
    # backend="none" with allow_unsafe=True is an explicit request.
    if level < settings.minimum and not (settings.backend == "none" and settings.allow_unsafe):
        raise UsageError(
            f"The sandbox backend {settings.backend} has isolation level {level.name.lower()}, but at least "
            f"{settings.minimum.name.lower()} is required; set minimum={level.name} to accept it."
        )
    try:
        return OPENERS[settings.backend](settings)
    except RunError as error:
        raise UsageError(f"The sandbox backend {settings.backend} does not work here: {error}") from error


def _open_automatic(settings: SandboxSettings) -> Sandbox:
    reasons = []
    for name in AUTOMATIC:
        if LEVELS[name] < settings.minimum:
            reasons.append(f"{name}: weaker than required")
            continue
        try:
            return OPENERS[name](settings)
        except RollgymError as error:
            reasons.append(f"{name}: {str(error).rstrip('.')}")
    if settings.allow_unsafe and settings.minimum is Level.NONE:
        return open_plain(settings)
    raise UsageError(
        f"No sandbox is available on this machine ({'; '.join(reasons)}). Fix: {HOW_TO_GET}; "
        f"{HOW_TO_ALLOW}; use backend='docker'; or, for weaker isolation, minimum=LANDLOCK. "
        "`rollgym doctor` prints details. backend='none' with allow_unsafe=True runs code unprotected."
    )
