"""Levels as XSB text, and the files they come in.

Two kinds of files are read, without telling them apart: Boxoban files (levels under lines ``; 0``, ``; 1``)
and XSB collections (titles, comments, rows of unequal length). A row is a line of board symbols with at
least one that is not floor; any other line is a title or a comment and ends a level.

    # wall   @ player   + player on target   $ box   * box on target   . target   space, - or _ floor
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollgym.core.errors import UsageError
from rollgym.core.seeding import stable_digest

_SYMBOLS = frozenset("#@+$*. -_")
_SOLID = frozenset("#@+$*.")
_FLOOR = str.maketrans("-_", "  ")


@dataclass(frozen=True, slots=True)
class Difficulty:
    """Difficulty of a level as measured by the solver."""

    moves: int
    """Steps of the solution, walking and pushing."""
    pushes: int
    nodes: int
    """Positions the search had to look at."""
    optimal: bool
    """True where no solution has fewer moves."""


@dataclass(frozen=True, slots=True)
class Level:
    """A closed rectangular room in XSB, with as many boxes as targets."""

    text: str
    difficulty: Difficulty | None = None


def load_levels(path: str | Path) -> tuple[Level, ...]:
    """The levels of a Boxoban or XSB file; a `UsageError` names the invalid one and the reason."""
    try:
        stat = Path(path).stat()
        return _load(str(path), stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise UsageError(f"The levels file {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"The levels file {path} is not text in UTF-8.") from None


@functools.lru_cache(maxsize=8)
def _load(path: str, _changed: int, _size: int) -> tuple[Level, ...]:
    """Cached, since every environment of a pool reads the same file."""
    return parse_levels(Path(path).read_text(encoding="utf-8-sig"), path)


def parse_levels(text: str, source: str = "levels") -> tuple[Level, ...]:
    """Parse the levels of a file; ``source`` is its name in error messages."""
    levels: list[Level] = []
    for line, rows in _blocks(text, source):
        try:
            levels.append(Level(normalize("\n".join(rows))))
        except ValueError as error:
            where = f"{source}, level {len(levels)} (counted from 0; line {line})"
            raise UsageError(f"{where}: {error}.") from None
    if not levels:
        raise UsageError(f"{source} holds no level: no line of it is a row of a board.")
    return tuple(levels)


def content_hash(levels: tuple[Level, ...]) -> str:
    """Return a short hash of the levels, regardless of comments between them."""
    return stable_digest(*(level.text for level in levels)).hex()[:12]


def _blocks(text: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """Runs of consecutive rows, each with the number of its first line."""
    rows: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate([*lines, ""], 1):
        if _is_row(line, number, source):
            rows.append(line.rstrip())
        elif rows:
            yield number - len(rows), rows
            rows = []


def _is_row(line: str, number: int, source: str) -> bool:
    strange = set(line.rstrip()) - _SYMBOLS
    inner = line.strip()
    if strange and len(inner) > 1 and inner[0] == inner[-1] == "#":
        raise UsageError(f"{source}, line {number}: {min(strange)!r} is not a symbol of a Sokoban board.")
    return not strange and not _SOLID.isdisjoint(line)


def normalize(text: str) -> str:
    """A board as a closed rectangle: rows padded, everything outside the walls made wall.

    Raises:
        ValueError: The board is invalid; the message gives the reason.
    """
    rows = [row.translate(_FLOOR) for row in text.split("\n")]
    indent = min(len(row) - len(row.lstrip()) for row in rows)
    width = max(len(row) for row in rows) - indent
    cells = [list(row[indent:].ljust(width)) for row in rows]
    _check_counts(text)
    outside = _outside(cells)
    _check_outside({cell: cells[cell[0]][cell[1]] for cell in outside})
    for row, column in outside:
        cells[row][column] = "#"
    return "\n".join("".join(row) for row in cells)


def _check_counts(text: str) -> None:
    players = text.count("@") + text.count("+")
    stray = text.count("$")
    boxes, targets = stray + text.count("*"), text.count(".") + text.count("+") + text.count("*")
    if players != 1:
        raise ValueError(f"it has {players} players, not one" if players else "it has no player")
    if boxes != targets:
        raise ValueError(f"it has {boxes} boxes but {targets} targets")
    if not boxes:
        raise ValueError("it has no boxes")
    if not stray:
        raise ValueError("every box already stands on a target")


def _outside(cells: list[list[str]]) -> list[tuple[int, int]]:
    """The cells that can be reached from beyond the edge without crossing a wall."""
    height, width = len(cells), len(cells[0])
    edge = [(r, c) for r in range(height) for c in (0, width - 1)]
    edge += [(r, c) for r in (0, height - 1) for c in range(width)]
    todo = [(r, c) for r, c in edge if cells[r][c] != "#"]
    outside = dict.fromkeys(todo)
    while todo:
        row, column = todo.pop()
        for r, c in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if 0 <= r < height and 0 <= c < width and cells[r][c] != "#" and (r, c) not in outside:
                outside[r, c] = None
                todo.append((r, c))
    return list(outside)


def _check_outside(outside: dict[tuple[int, int], str]) -> None:
    if not {"@", "+"}.isdisjoint(outside.values()):
        raise ValueError("it is not enclosed: there is a way from the player to the outside")
    stray = [cell for cell, symbol in outside.items() if symbol != " "]
    if stray:
        row, column = min(stray)
        raise ValueError(f"a box or target lies outside the walls (row {row}, column {column}, from 0)")
