"""Incremental reading of line files that are appended to, truncated or half written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollgym.core.files import open_inside

LONGEST = 64_000_000
"""Maximum bytes of a line; an episode of 1,000 turns has a few million."""
_PIECE = 1 << 20
_CHECK = 64
"""Bytes before the read position that are compared to detect a replaced file."""


@dataclass(slots=True)
class Skipped:
    """Skipped lines of a file with the reason of the first."""

    count: int = 0
    first: str = ""
    half: int = 0
    """Skipped lines without newline."""

    def add(self, number: int, reason: str, half: bool = False) -> None:
        """Count a skipped line."""
        self.count += 1
        self.half += half
        self.first = self.first or f"line {number}: {reason}"


@dataclass(frozen=True, slots=True)
class Line:
    """A line and its position in the file."""

    number: int
    start: int
    data: bytes
    whole: bool
    """False for a last line without its newline."""


@dataclass(slots=True)
class Tail:
    """Reads the lines added to a file since the last call."""

    path: Path
    folder: Path | None = None
    """Folder that must contain the file: links out of it are not followed."""
    longest: int = LONGEST
    """Maximum bytes of a line; longer ones are skipped and counted."""
    skipped: Skipped = field(default_factory=Skipped)
    again: int = 0
    """Number of times the file was truncated and read from the start."""
    _at: int = 0
    _number: int = 0
    _before: bytes = b""

    def changed(self) -> bool:
        """Restart from the beginning if the file was truncated or replaced."""
        if not self._at:
            return False
        try:
            with open_inside(self.path, self.folder) as file:
                file.seek(max(0, self._at - _CHECK))
                same = file.read(min(_CHECK, self._at)) == self._before
        except OSError:
            same = False
        if not same:
            self.restart()
            self.again += 1
        return not same

    def restart(self) -> None:
        """Read the file from its start."""
        self._at, self._number, self._before, self.skipped = 0, 0, b"", Skipped()

    def new(self, *, final: bool = False) -> Iterator[Line]:
        """Return complete new lines; with ``final`` also a last one without newline."""
        try:
            file = open_inside(self.path, self.folder)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            if not self.skipped.count:
                self.skipped.add(0, str(getattr(error, "strerror", None) or error))
            return
        with file:
            file.seek(self._at)
            while data := file.readline(self.longest + 1):
                size, too_long = len(data), len(data) > self.longest
                before = (self._before + data)[-_CHECK:]
                while too_long and not data.endswith(b"\n") and (data := file.readline(_PIECE)):
                    size += len(data)
                    before = (before + data)[-_CHECK:]
                whole = before.endswith(b"\n")
                if not whole and not final:
                    return
                line = Line(self._number + 1, self._at, data.rstrip(b"\r\n"), whole)
                self._number += 1
                self._at += size
                self._before = before
                if too_long:
                    self.skipped.add(line.number, f"longer than {self.longest:,} bytes", not whole)
                elif line.data.strip():
                    yield line

    def objects(self, *, final: bool = False) -> Iterator[dict[str, Any]]:
        """Return new lines that are JSON objects; others are skipped and counted."""
        for line in self.new(final=final):
            try:
                yield msgspec.json.decode(line.data, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                self.skipped.add(line.number, str(error), not line.whole)


def read_at(path: Path, folder: Path, start: int, size: int) -> bytes:
    """Read a line by its position."""
    with open_inside(path, folder) as file:
        file.seek(start)
        return file.read(size)
