"""A working folder on the host's own disk, for sandboxes without a file system of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.sandbox.launch import Pipes


def make_folder(uid: int | None) -> str:
    """A new folder that only the user id inside can enter."""
    folder = tempfile.mkdtemp(prefix=f"rollgym-sandbox-{os.getpid()}-")
    if uid is not None:
        os.chown(folder, uid, uid)
    return folder


MARK = "ROLLGYM_SANDBOX_FOLDER"
"""In the environment that the worker is started with, and so in that of its forks; programs they start have
it no more."""


class PipesWithFolder(Pipes):
    """A channel to a worker whose folder goes with it."""

    def __init__(
        self, folder: str, command: Sequence[str], *, environment: Mapping[str, str], **options: Any
    ) -> None:
        self.folder = folder
        try:
            super().__init__(command, environment={**environment, MARK: folder}, **options)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def close(self) -> None:
        """End the worker and all below it, and delete its folder."""
        super().close()
        if self._process.returncode:
            _kill_marked(f"{MARK}={self.folder}".encode())
        shutil.rmtree(self.folder, ignore_errors=True)


def _kill_marked(mark: bytes) -> None:
    """End forks of a worker that was killed: a session that was stopped does not notice it."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                os.kill(int(name), signal.SIGKILL)
