"""A working folder on the host's own disk, for sandboxes without a file system of their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from rollgym.sandbox.launch import Pipes


def make_folder(uid: int | None) -> str:
    """A new folder that only the user id inside can enter."""
    folder = tempfile.mkdtemp(prefix=f"rollgym-sandbox-{os.getpid()}-")
    if uid is not None:
        os.chown(folder, uid, uid)
    return folder


class PipesWithFolder(Pipes):
    """A channel to a worker whose folder goes with it."""

    def __init__(self, folder: str, command: Sequence[str], **options: Any) -> None:
        self.folder = folder
        try:
            super().__init__(command, **options)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def close(self) -> None:
        """End the worker and all below it, and delete its folder."""
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)
