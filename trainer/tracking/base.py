"""The tracker protocol, and the append-only file that trackers write to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollgym.core.errors import RollgymError, RunError, os_reason
from rollgym.core.files import open_append

Tags = Mapping[str, float]
"""Numbers by their name in a tracker, such as ``train/success``."""


class Tracker:
    """A destination for metrics besides the JSONL files, such as TensorBoard; the base class of all."""

    def log(self, line: Mapping[str, Any], tags: Tags) -> None:
        """Write the numbers of one line of ``metrics.jsonl`` or ``evaluations.jsonl``."""

    def rewind(self, first: int, kept: Iterable[tuple[Mapping[str, Any], Tags]]) -> None:
        """Forget step ``first`` and all later ones, then log the ``kept`` lines of these steps again."""

    def flush(self) -> None:
        """Return once everything logged is on disk."""

    def close(self, *, failed: bool = False) -> None:
        """Flush and release all resources; ``failed``: the run ended with an error."""


class AppendOnlyFile:
    """A file that grows at its end or is truncated to an earlier size; a failed write leaves no trace."""

    def __init__(self, path: Path, error: type[RollgymError] = RunError) -> None:
        self.path = path
        with _write_errors(path, error):
            with suppress(FileExistsError):
                path.parent.mkdir(parents=True)
            self._file = open_append(path, buffering=0)
        self.fileno = self._file.fileno

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self.fileno()).st_size

    def write(self, data: bytes) -> None:
        """Append all of ``data``, or nothing."""
        before, left = self.size, memoryview(data)
        with _write_errors(self.path):
            try:
                while left:
                    left = left[os.write(self.fileno(), left) :]
            except BaseException:
                with suppress(OSError):
                    self._file.truncate(before)
                raise

    def truncate(self, size: int) -> None:
        """Drop everything after ``size`` bytes."""
        with _write_errors(self.path):
            self._file.truncate(size)

    def sync(self) -> None:
        """Return once everything written is on disk."""
        with _write_errors(self.path):
            os.fsync(self.fileno())

    def close(self) -> None:
        """Sync and close."""
        with self._file:
            self.sync()

    def complete_end(self, end: int) -> int:
        """The offset after the last complete line before ``end``."""
        return self._line_end(end)

    def _line_end(self, end: int, block: int = 1 << 16) -> int:
        while end:
            start = max(0, end - block)
            newline = os.pread(self.fileno(), end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0


@contextmanager
def _write_errors(path: Path, kind: type[RollgymError] = RunError) -> Iterator[None]:
    """Turn an `OSError` into an error that names the file and the reason."""
    try:
        yield
    except OSError as error:
        raise kind(f"Cannot write {path}: {os_reason(error)}.") from error
