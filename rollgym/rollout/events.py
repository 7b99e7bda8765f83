"""The event log: every change of state, in order, append-only.

One JSON object per line: ``t`` (seconds since the log began), ``kind`` and further fields. The log alone is
enough to draw a timeline of every episode (`rollgym.rollout.trace`). A resumed run rewinds the log to the
last step that it keeps, appends there and continues its time.

The log is rotated: ``events.jsonl`` holds the newest events, and what was there before is in files such as
``events-000000000000000-000000067108864.jsonl.gz``, named by the bytes of the log that they hold. These names
are the index; positions in the log count from its beginning. The oldest files are deleted once all of them
take more than ``max_bytes`` on disk.

Kinds: ``group_started``, ``group_deferred`` (expected to be slow, starts later), ``group_ready``,
``group_dropped``, ``group_taken``, ``group_discarded`` (with ``reason``: ``dropped``, ``filtered`` or
``stale``), ``group_cancelled`` (too stale while running), ``episode_started``, ``episode_state``,
``episode_finished``, ``episode_retried``, ``episode_restarted``, ``eval_retried``, ``weights_updated``,
``paused``, ``draining``, ``resumed``, ``stalled``. What each training step was trained on is not here but in
``steps.jsonl`` (`rollgym.trainer.step_log`), which keeps every step.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from rollgym.core.errors import ResultsError
from rollgym.core.files import gunzip, open_append, read_bounded, replacing

MOST_BYTES = 4_000_000_000
"""Largest log that is read as a whole."""
SEGMENT_BYTES = 64 * 2**20
"""Size at which ``events.jsonl`` is rotated."""
MAX_BYTES = 1_000_000_000
"""Largest size of all files of a log on disk; rotated ones are compressed."""
_TAIL = 1 << 20
_GZIP_LEVEL = 3

Event = dict[str, Any]


class EventLog:
    """Writes events to a file, keeps them in memory (``keep``), or only counts them.

    Args:
        path: The newest file of the log; rotated ones are beside it.
        keep: Keep all events in memory.
        clock: Seconds of a clock that does not go back.
        segment_bytes: Size at which the file is rotated.
        max_bytes: Bytes of all files on disk above which the oldest are deleted.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        keep: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        segment_bytes: int = SEGMENT_BYTES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.events: list[Event] = []
        self._keep = keep
        self.count = 0
        self._clock = clock
        self._began = clock()
        self._encoder = msgspec.json.Encoder()
        self._file: IO[bytes] | None = None
        self._path = path or Path()
        self._segment_bytes, self._max_bytes = segment_bytes, max_bytes
        self._start = 0
        """Position of the file's first byte in the log."""
        self._length = 0
        """Bytes of the file, with those that are still buffered."""
        self._compressing: threading.Thread | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            segments = rotated_files(path)
            self._start = segments[-1].end if segments else 0
            self._began -= _repair(path) or (_last_time(segments[-1].read()) if segments else 0.0)
            self._file = self._open()

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
            line = self._encoder.encode(event) + b"\n"
            self._file.write(line)
            self._length += len(line)
            if self._length >= self._segment_bytes:
                self._file = self._rotate(self._file)

    def flush(self) -> None:
        """Write buffered events to the file."""
        if self._file is not None:
            self._file.flush()

    @property
    def size(self) -> int:
        """Bytes of the whole log, rotated and buffered ones included; 0 without a file."""
        self.flush()
        return self._start + self._length

    def rewind(self, size: int) -> None:
        """Forget everything after the first ``size`` bytes of the log."""
        if self._file is None or size >= self.size:
            return
        self._file.flush()
        if size < self._start:
            self._file = self._restore(self._file, size)
        self._file.truncate(size - self._start)
        self._length = size - self._start

    def close(self) -> None:
        """Flush and close the file; returns once rotated files are compressed."""
        self._wait()
        if self._file is not None and not self._file.closed:
            self._file.close()

    def _open(self) -> IO[bytes]:
        file = open_append(self._path)
        self._length = os.fstat(file.fileno()).st_size
        return file

    def _rotate(self, file: IO[bytes]) -> IO[bytes]:
        """Begin a new file; the one before gets the name of its range and is compressed in a thread."""
        self._wait()
        file.close()
        end = self._start + self._length
        full = self._path.with_name(f"{self._path.stem}-{self._start:015d}-{end:015d}.jsonl")
        self._path.rename(full)
        self._start = end
        self._compressing = threading.Thread(target=self._compress, args=(full,), name="events")
        self._compressing.start()
        return self._open()

    def _compress(self, full: Path) -> None:
        """Compress a rotated file, and delete the oldest ones of a log that is too large."""
        with suppress(OSError):  # on a full disk it stays as it is
            with (
                open(full, "rb") as content,
                replacing(full.with_name(f"{full.name}.gz")) as file,
                gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0) as packed,
            ):
                shutil.copyfileobj(content, packed, 1 << 20)
            full.unlink()
        with suppress(OSError):
            kept = self._segment_bytes  # of the newest file
            for segment in reversed(rotated_files(self._path)):
                kept += segment.path.stat().st_size
                if kept > self._max_bytes:
                    segment.path.unlink()

    def _wait(self) -> None:
        if self._compressing is not None:
            self._compressing.join()
            self._compressing = None

    def _restore(self, file: IO[bytes], size: int) -> IO[bytes]:
        """Make the rotated file with this position the newest again.

        A process that is killed in here leaves files from which the same rewind gives the same result.
        """
        self._wait()
        content, found = b"", None
        for segment in reversed(rotated_files(self._path)):
            if segment.start <= size:
                content, found = segment.read()[: size - segment.start], segment
                break
            segment.path.unlink()
        file.close()
        with replacing(self._path) as newest:
            newest.write(content)
        if found is not None:
            found.path.unlink()
        # Without that file, which was deleted as too old, the log begins here.
        self._start = size if found is None else found.start
        return self._open()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class RotatedFile:
    """An older part of a log: the bytes from ``start`` to ``end``."""

    start: int
    end: int
    path: Path

    def read(self, folder: Path | None = None) -> bytes:
        """Its content; with ``folder``, a link that leads out is not followed.

        Raises:
            OSError: It cannot be read, or is damaged.
        """
        data = read_bounded(self.path, MOST_BYTES, folder)
        return gunzip(data, MOST_BYTES) if self.path.suffix == ".gz" else data


def rotated_files(path: Path) -> list[RotatedFile]:
    """The rotated files of a log, oldest first."""
    pattern = re.compile(re.escape(path.stem) + r"-(\d{15})-(\d{15})\.jsonl(\.gz)?")
    found: dict[tuple[int, int], RotatedFile] = {}
    try:
        names = sorted(os.listdir(path.parent))
    except OSError:
        return []
    for name in names:
        if match := pattern.fullmatch(name):
            start, end = int(match[1]), int(match[2])
            # While one is compressed there may be both: sorted, the compressed one is last, and complete.
            found[start, end] = RotatedFile(start, end, path.with_name(name))
    return [found[key] for key in sorted(found)]


def _repair(path: Path) -> float:
    """Remove an incomplete last line, left by a crash; returns the time of the last complete one."""
    if not path.exists():
        return 0.0
    with open_append(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL))
        tail = file.read()
        file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
    return _last_time(tail)


def _last_time(tail: bytes) -> float:
    """The time of the last complete line; 0 without one."""
    for line in reversed(tail[-_TAIL:].split(b"\n")[:-1]):
        try:
            return float(msgspec.json.decode(line)["t"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError):
            continue
    return 0.0


def read_events(path: Path) -> list[Event]:
    """Read all events of a log. An incomplete last line is skipped; other damage is an error."""
    return [event for part, content in _contents(path) for event in _parse(part, content)]


def _contents(path: Path) -> Iterator[tuple[Path, bytes]]:
    """The files of a log, oldest first, and their content."""
    part = path
    try:
        for segment in rotated_files(path):
            part = segment.path
            yield part, segment.read()
        part = path
        yield path, read_bounded(path, MOST_BYTES)
    except OSError as error:
        raise ResultsError(f"Cannot read {part}: {error.strerror}.") from None


def _parse(path: Path, content: bytes) -> list[Event]:
    lines = content.split(b"\n")
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
