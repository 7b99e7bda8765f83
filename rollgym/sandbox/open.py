"""Opening a sandbox: the strongest that works here, and none that is weaker than was asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from rollgym.errors import RollgymError, RunError, UsageError
from rollgym.sandbox.landlock import open_landlock
from rollgym.sandbox.namespaces import HOW_TO_ALLOW, HOW_TO_GET, open_namespaces
from rollgym.sandbox.plain import open_plain
from rollgym.sandbox.types import Level, Sandbox, SandboxSettings

LEVELS = {
    "namespaces": Level.NAMESPACES,
    "docker": Level.NAMESPACES,
    "landlock": Level.LANDLOCK,
    "none": Level.NONE,
}
"""How strong the walls of each backend are."""
AUTOMATIC = ("namespaces", "landlock")


def open_docker(settings: SandboxSettings) -> Sandbox:
    """The backend ``docker``, whose library is loaded only when it is asked for."""
    sandbox: Sandbox = importlib.import_module("rollgym.sandbox.docker").open_docker(settings)
    return sandbox


OPENERS: dict[str, Callable[[SandboxSettings], Sandbox]] = {
    "namespaces": open_namespaces,
    "landlock": open_landlock,
    "docker": open_docker,
    "none": open_plain,
}


def open_sandbox(settings: SandboxSettings | None = None) -> Sandbox:
    """Open the sandbox that was asked for, or say why it cannot be and what would help."""
    settings = settings or SandboxSettings()
    if settings.backend == "auto":
        return _open_automatic(settings)
    if settings.backend not in OPENERS:
        names = ", ".join(["auto", *OPENERS])
        raise UsageError(f"There is no sandbox backend {settings.backend!r}; there are {names}.")
    level = LEVELS[settings.backend]
    # Whoever names `none` and says allow_unsafe has said twice what they want.
    if level < settings.minimum and not (settings.backend == "none" and settings.allow_unsafe):
        raise UsageError(
            f"The sandbox backend {settings.backend} has walls of level {level.name.lower()}, but at least "
            f"{settings.minimum.name.lower()} was asked for; set minimum={level.name} to accept it."
        )
    try:
        return OPENERS[settings.backend](settings)
    except RunError as error:
        raise UsageError(f"The sandbox backend {settings.backend} does not work here: {error}") from error


def _open_automatic(settings: SandboxSettings) -> Sandbox:
    reasons = []
    for name in AUTOMATIC:
        if LEVELS[name] < settings.minimum:
            reasons.append(f"{name}: weaker than asked for")
            continue
        try:
            return OPENERS[name](settings)
        except RollgymError as error:
            reasons.append(f"{name}: {str(error).rstrip('.')}")
    if settings.allow_unsafe and settings.minimum is Level.NONE:
        return open_plain(settings)
    raise UsageError(
        f"No walls for untrusted code on this machine ({'; '.join(reasons)}). What helps: {HOW_TO_GET}; "
        f"{HOW_TO_ALLOW}; use backend='docker'; or, for weaker walls, minimum=LANDLOCK. "
        "`rollgym doctor` says more. backend='none' with allow_unsafe=True runs code unprotected."
    )
