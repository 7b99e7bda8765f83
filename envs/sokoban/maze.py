"""A level for the solver: sets of cells as the bits of one integer, and tables made once.

Bit ``i`` is character ``i`` of the level's text, newlines included: moving a set of cells one step is a
shift, and walls and newlines (never floor) stop a shift from running over the edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FAR = 1_000_000
"""Distance of a target that cannot be reached."""


@dataclass(frozen=True, slots=True)
class Maze:
    """The fixed part of a level."""

    row: int
    """Length of a row with its newline: the difference of a cell's number to the one below."""
    floor: int
    targets: int
    alive: int
    """Cells from which a box alone in the room could be pushed to some target."""
    distances: tuple[tuple[int, ...], ...]
    """For each cell, the pushes a box there needs to each target, the room being otherwise empty."""


def read_maze(text: str) -> tuple[Maze, int, int]:
    """The maze, the boxes and the player of a level in XSB."""
    row = text.index("\n") + 1
    floor, targets, boxes, player = (_mask(text, symbols) for symbols in (" .*+$@", ".*+", "$*", "@+"))
    columns = [_pushes_to(target, floor, row, len(text)) for target in split(targets)]
    distances = tuple(zip(*columns, strict=True))
    alive = sum(1 << cell for cell, costs in enumerate(distances) if min(costs) < FAR)
    return Maze(row, floor, targets, alive, distances), boxes, player


def split(mask: int) -> Iterator[int]:
    """The cells of a set, one bit each, in order."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def flood(start: int, free: int, row: int) -> int:
    """Every free cell that can be walked to from ``start``."""
    while True:
        more = (start | start << 1 | start >> 1 | start << row | start >> row) & free
        if more == start:
            return start
        start = more


def walk(start: int, goal: int, free: int, row: int) -> str:
    """A shortest walk between two cells, in the letters u, d, l, r. The goal must be in reach."""
    rings = [start]
    seen = start
    while not rings[-1] & goal:
        ring = rings[-1]
        ring = (ring << 1 | ring >> 1 | ring << row | ring >> row) & free & ~seen
        seen |= ring
        rings.append(ring)
    letters = []
    for ring in reversed(rings[:-1]):
        for letter, came_from in (("u", goal << row), ("d", goal >> row), ("l", goal << 1), ("r", goal >> 1)):
            if came_from & ring:
                letters.append(letter)
                goal = came_from
                break
    return "".join(reversed(letters))


def _mask(text: str, symbols: str) -> int:
    return sum(1 << cell for cell, symbol in enumerate(text) if symbol in symbols)


def _pushes_to(target: int, floor: int, row: int, cells: int) -> list[int]:
    """For each cell, the pushes from there to the target: found by pulling backwards from it."""
    distances = [FAR] * cells
    ring, seen, distance = target, target, 0
    while ring:
        for bit in split(ring):
            distances[bit.bit_length() - 1] = distance
        # The box comes from one cell back, pushed by a player who stood one further back.
        right, left = ring >> 1 & floor & floor << 1, ring << 1 & floor & floor >> 1
        down, up = ring >> row & floor & floor << row, ring << row & floor & floor >> row
        ring = (right | left | down | up) & ~seen
        seen |= ring
        distance += 1
    return distances
