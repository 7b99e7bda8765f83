"""TensorBoard event files: one new file for each start of a run."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollgym.core.errors import MissingExtra
from rollgym.trainer.tracking.base import AppendOnlyFile, Tags, Tracker


class TensorBoardTracker(Tracker):
    """Writes event files that survive a killed process; needs no TensorFlow."""

    def __init__(self, folder: Path) -> None:
        try:
            self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
            self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
            self._writer = importlib.import_module("tensorboard.summary.writer.record_writer").RecordWriter
        except ImportError:
            raise MissingExtra("Logging to TensorBoard", "train") from None
        self._folder = folder
        self._file: AppendOnlyFile | None = None
        """Created by the first event."""

    def log(self, line: Mapping[str, Any], tags: Tags) -> None:
        """Write one event with all numbers of the line."""
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self._write(step=line["step"], wall_time=line["time"], summary=self._summary(value=values))

    def rewind(self, first: int, kept: Iterable[tuple[Mapping[str, Any], Tags]]) -> None:
        """Hide step ``first`` and all later ones in earlier event files, then log ``kept`` again."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step=first, wall_time=time.time(), session_log=start)
        for line, tags in kept:
            self.log(line, tags)

    def flush(self) -> None:
        """Return once all events are on disk."""
        if self._file is not None:
            self._file.sync()

    def close(self, *, failed: bool = False) -> None:
        """Flush and close the event file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, **fields: Any) -> None:
        if self._file is None:
            # TensorBoard reads files in the order of their names: a clock can be set back, a count cannot.
            name, count = "events.out.tfevents.", "[0-9]" * 6
            last = max((int(path.suffix[1:]) for path in self._folder.glob(name + count)), default=0)
            self._file = AppendOnlyFile(self._folder / f"{name}{last + 1:06d}")
            self._write(wall_time=time.time(), file_version="brain.Event:2")
        self._writer(self._file).write(self._events.Event(**fields).SerializeToString())
