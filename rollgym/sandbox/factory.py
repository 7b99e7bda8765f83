"""Opens the strongest sandbox available that meets the requested isolation level, and tests each backend."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from rollgym.core.errors import RollgymError, RunError, UsageError
from rollgym.core.extras import install_command
from rollgym.sandbox import client
from rollgym.sandbox.client import ENVIRONMENT, WorkerSandbox
from rollgym.sandbox.interpreter import Interpreter
from rollgym.sandbox.landlock import LEAST_ABI, open_landlock
from rollgym.sandbox.launch import PipesWithFolder, boot, make_folder
from rollgym.sandbox.namespaces import HOW_TO_ALLOW, HOW_TO_GET, find_bwrap, open_namespaces
from rollgym.sandbox.types import Level, Limits, Sandbox, SandboxSettings

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
    _check_links(settings.backend, settings)
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


def _check_links(backend: str, settings: SandboxSettings) -> None:
    if settings.links and backend != "namespaces":
        paths = ", ".join(path for path, _ in settings.links)
        raise UsageError(f"The sandbox backend {backend} cannot link {paths}; only namespaces can.")
    if settings.folders and backend not in ("namespaces", "docker"):
        paths = ", ".join(settings.folders)
        raise UsageError(f"The sandbox backend {backend} cannot add {paths}; only namespaces and docker can.")


def _open_automatic(settings: SandboxSettings) -> Sandbox:
    reasons = []
    for name in AUTOMATIC:
        if LEVELS[name] < settings.minimum:
            reasons.append(f"{name}: weaker than required")
            continue
        try:
            _check_links(name, settings)
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


PROBE = "print(6 * 7)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of trying one backend."""

    backend: str
    level: Level
    works: bool
    seconds: float
    """Seconds of the trial."""
    reason: str = ""
    """Why it does not work."""
    fix: str = ""
    """How to fix it."""
    weaknesses: tuple[str, ...] = ()
    python: str = ""
    """Python that runs inside."""


def doctor() -> list[Finding]:
    """Try each backend with a line of code, strongest first."""
    return [examine(name) for name in OPENERS]


def examine(backend: str) -> Finding:
    """Try one backend."""
    settings = SandboxSettings(
        backend=backend,  # type: ignore[arg-type]
        minimum=Level.NONE,
        allow_unsafe=True,
        limits=Limits(seconds=5),
    )
    started = time.perf_counter()
    reason, python = "", ""
    weaknesses: tuple[str, ...] = ()
    try:
        with contextlib.closing(OPENERS[backend](settings)) as sandbox:
            ran = sandbox.exec(PROBE)
            if ran.stdout != "42\n":
                raise RunError(f"a line of code did not run: {ran.ended}, {ran.stderr[-200:]}")
            weaknesses, python = sandbox.weaknesses, getattr(sandbox, "python", "")
    except (RollgymError, ImportError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
    return Finding(
        backend=backend,
        level=LEVELS[backend],
        works=not reason,
        seconds=time.perf_counter() - started,
        reason=reason,
        fix=_fix(backend) if reason else "",
        weaknesses=weaknesses,
        python=python,
    )


def _fix(backend: str) -> str:
    return {
        "namespaces": HOW_TO_ALLOW if find_bwrap() else HOW_TO_GET,
        "landlock": f"a kernel with Landlock of version {LEAST_ABI} or later (Linux 6.2), and lsm=landlock",
        "docker": f"start a Docker engine, {install_command('docker')}, and rollgym sandbox build-image",
        "none": "nothing: it should work everywhere",
    }[backend]
