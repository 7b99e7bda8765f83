"""No walls at all: for code that is trusted, or for a machine that is itself the sandbox."""

from __future__ import annotations

import sys

from rollgym.errors import UsageError
from rollgym.sandbox import client
from rollgym.sandbox.client import ENVIRONMENT, WorkerSandbox
from rollgym.sandbox.folder import PipesWithFolder, make_folder
from rollgym.sandbox.interpreter import Interpreter
from rollgym.sandbox.launch import boot
from rollgym.sandbox.types import Level, SandboxSettings

WEAKNESSES = (
    "There are no walls: the code can do all that this process can, to files, processes and networks.",
)


def open_plain(settings: SandboxSettings) -> WorkerSandbox:
    """Start a worker without walls, where that was allowed."""
    if not settings.allow_unsafe:
        raise UsageError(
            "The backend none runs code with all rights of this process; say allow_unsafe=True to accept it."
        )
    # The Python of this process, as nobody else has to read it.
    python = Interpreter(sys.executable, (), f"the Python of this process, {sys.version.split()[0]}")
    folder = make_folder(None)
    channel = PipesWithFolder(folder, python.command(settings.preload), uid=None, environment=ENVIRONMENT)
    config = client.worker_config(
        settings.limits,
        walls="none",
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
