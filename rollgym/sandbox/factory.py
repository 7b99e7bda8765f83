"""Opens the strongest sandbox available that meets the requested isolation level."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from rollgym.core.errors import RollgymError, RunError, UsageError
from rollgym.sandbox.landlock import open_landlock
from rollgym.sandbox.namespaces import HOW_TO_ALLOW, HOW_TO_GET, open_namespaces
from rollgym.sandbox.types import Level, Sandbox, SandboxSettings
from rollgym.sandbox.unsandboxed import open_plain

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
