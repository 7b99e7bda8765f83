"""No isolation: for trusted code, or a machine that is itself the sandbox."""

from __future__ import annotations

import sys

from rollgym.core.errors import UsageError
from rollgym.sandbox import client
from rollgym.sandbox.client import ENVIRONMENT, WorkerSandbox
from rollgym.sandbox.interpreter import Interpreter
from rollgym.sandbox.launch import boot
from rollgym.sandbox.types import Level, SandboxSettings
from rollgym.sandbox.workdir import PipesWithFolder, make_folder

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
