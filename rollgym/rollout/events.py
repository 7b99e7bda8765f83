"""The event log: every change of state, in order, append-only.

One JSON object per line: ``t`` (seconds since the log began), ``kind`` and further fields. The log alone is
enough to draw a timeline of every episode (`rollgym.rollout.trace`). A resumed run rewinds the log to the
last step that it keeps, appends there and continues its time.

Kinds: ``group_started``, ``group_deferred`` (expected to be slow, starts later), ``group_ready``,
``group_dropped``, ``group_taken``, ``group_discarded`` (with ``reason``: ``dropped``, ``filtered`` or
``stale``), ``group_cancelled`` (too stale while running), ``episode_started``, ``episode_state``,
``episode_finished``, ``episode_retried``, ``episode_restarted``, ``eval_retried``, ``weights_updated``,
``paused``, ``draining``, ``resumed``, ``stalled``; in training also ``step_trained``
(`rollgym.trainer.step_log`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from rollgym.core.errors import ResultsError
from rollgym.core.files import open_append, read_bounded

MOST_BYTES = 4_000_000_000
"""Largest log that is read as a whole."""
_TAIL = 1 << 20

Event = dict[str, Any]


class EventLog:
    """Writes events to a file, keeps them in memory (``keep``), or only counts them."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        keep: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.events: list[Event] = []
        self._keep = keep
        self.count = 0
        self._clock = clock
        self._began = clock()
        self._encoder = msgspec.json.Encoder()
        self._file: IO[bytes] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._began -= _repair(path)
            self._file = open_append(path)

    @property
    def now(self) -> float:
        """Seconds since the log began."""
        return self._clock() - self._began

    def add(self, kind: str, **fields: Any) -> None:
        """Add an event with the current time."""
        self.count += 1
        if not self._keep and self._file is None:
            return
        event: Event = {"t": round(self.now, 6), "kind": kind, **fields}
        if self._keep:
            self.events.append(event)
        if self._file is not None:
            self._file.write(self._encoder.encode(event) + b"\n")

    def flush(self) -> None:
        """Write buffered events to the file."""
        if self._file is not None:
            self._file.flush()

    @property
    def size(self) -> int:
        """Bytes of the file, buffered events included; 0 without a file."""
        if self._file is None:
            return 0
        self._file.flush()
        return os.fstat(self._file.fileno()).st_size

    def rewind(self, size: int) -> None:
        """Forget everything after the first ``size`` bytes of the file."""
        if self._file is not None and size < self.size:
            self._file.truncate(size)

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None and not self._file.closed:
            self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _repair(path: Path) -> float:
    """Remove an incomplete last line, left by a crash; returns the time of the last complete one."""
    if not path.exists():
        return 0.0
    with open_append(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL))
        tail = file.read()
        file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
    for line in reversed(tail.split(b"\n")[:-1]):
        try:
            return float(msgspec.json.decode(line)["t"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError):
            continue
    return 0.0


def read_events(path: Path) -> list[Event]:
    """Read all events of a log file. An incomplete last line is skipped; other damage is an error."""
    try:
        lines = read_bounded(path, MOST_BYTES).split(b"\n")
    except OSError as error:
        raise ResultsError(f"Cannot read {path}: {error.strerror}.") from None
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            event = msgspec.json.decode(line)
            if not isinstance(event, dict) or not {"t", "kind"} <= event.keys():
                raise msgspec.ValidationError("t or kind is missing")
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            if number == len(lines):
                break
            raise ResultsError(f"{path}, line {number}: not an event ({error}).") from None
        events.append(event)
    return events
