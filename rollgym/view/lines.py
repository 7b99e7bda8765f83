"""Lines of files that others append to, cut short or leave half written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollgym.files import open_inside

LONGEST = 64_000_000
"""Bytes of a line; an episode of a thousand turns has a few millions."""
_PIECE = 1 << 20
_CHECK = 64
"""How many bytes before the place we stopped at tell whether the file is still the same."""


@dataclass(slots=True)
class Skipped:
    """Lines of a file that could not be read, and why the first could not."""

    count: int = 0
    first: str = ""
    half: int = 0
    """Those of them that only lack their end."""

    def add(self, number: int, reason: str, half: bool = False) -> None:
        """Count a line."""
        self.count += 1
        self.half += half
        self.first = self.first or f"line {number}: {reason}"


@dataclass(frozen=True, slots=True)
class Line:
    """One line and its place in the file."""

    number: int
    start: int
    data: bytes
    whole: bool
    """False for a last line without its newline."""


@dataclass(slots=True)
class Tail:
    """What is new in a file since the last time."""

    path: Path
    folder: Path | None = None
    """What the file must lie in: a link that leads out of it is not followed."""
    longest: int = LONGEST
    """Bytes of a line; longer ones are skipped and counted."""
    skipped: Skipped = field(default_factory=Skipped)
    again: int = 0
    """How often the file turned out to have been cut back, and was read from its start."""
    _at: int = 0
    _number: int = 0
    _before: bytes = b""

    def changed(self) -> bool:
        """Look whether the file was cut back or replaced; if so, all of it is new again."""
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
        """Whole lines that were added; with ``final`` also a last one without its newline."""
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
        """The new lines that are JSON objects; others are skipped and counted."""
        for line in self.new(final=final):
            try:
                yield msgspec.json.decode(line.data, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                self.skipped.add(line.number, str(error), not line.whole)


def read_at(path: Path, folder: Path, start: int, size: int) -> bytes:
    """A line again, by its place."""
    with open_inside(path, folder) as file:
        file.seek(start)
        return file.read(size)
