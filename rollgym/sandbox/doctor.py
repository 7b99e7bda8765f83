"""Tries every sandbox backend and reports what is missing and how to fix it."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from rollgym.core.errors import RollgymError, RunError
from rollgym.core.extras import install_command
from rollgym.sandbox.factory import LEVELS, OPENERS
from rollgym.sandbox.landlock import LEAST_ABI
from rollgym.sandbox.namespaces import HOW_TO_ALLOW, HOW_TO_GET, find_bwrap
from rollgym.sandbox.types import Level, Limits, SandboxSettings

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
