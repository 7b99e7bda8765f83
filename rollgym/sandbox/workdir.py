"""Working folder on the host's disk, for sandboxes without a separate file system."""

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
    """Create a folder that only the user id inside can enter."""
    folder = tempfile.mkdtemp(prefix=f"rollgym-sandbox-{os.getpid()}-")
    if uid is not None:
        os.chown(folder, uid, uid)
    return folder


MARK = "ROLLGYM_SANDBOX_FOLDER"
"""Environment variable of the worker and its forks; removed for programs they start."""


class PipesWithFolder(Pipes):
    """Channel to a worker that deletes its folder on close."""

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
        """End the worker and its descendants and delete its folder."""
        super().close()
        if self._process.returncode:
            _kill_marked(f"{MARK}={self.folder}".encode())
        shutil.rmtree(self.folder, ignore_errors=True)


def _kill_marked(mark: bytes) -> None:
    """End forks of a killed worker; a stopped session does not notice its death."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                os.kill(int(name), signal.SIGKILL)
