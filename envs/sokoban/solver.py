"""A* over pushes: the fewest moves, or nearly, in pure Python.

A node is the boxes and the cell where the last push left the player; a move in the search is a walk and
one push, and costs its steps. The estimate of the remaining cost is the cheapest matching of boxes to
targets by push distance, which never overestimates: with ``weight=1`` a solution has the fewest moves.
A greater weight trusts the estimate more and looks at far fewer positions, for a slightly longer solution.

Positions without a solution are refused early: a box on a dead cell, boxes that cannot all reach
distinct targets, boxes frozen off the targets (`deadlock`). When nothing is left to look at, the level is
proved unsolvable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from rollgym.envs.sokoban.deadlock import any_frozen, is_frozen
from rollgym.envs.sokoban.matching import cheapest_matching
from rollgym.envs.sokoban.maze import FAR, Maze, read_maze, split, walk

FAST_WEIGHT = 5
"""On Boxoban's levels: solutions about a tenth longer than the shortest, after far fewer positions."""


class Status(StrEnum):
    """How a search ended."""

    SOLVED = "solved"
    UNSOLVABLE = "unsolvable"
    GAVE_UP = "gave up"


@dataclass(frozen=True, slots=True)
class Result:
    """Result status. Only ``UNSOLVABLE`` is a proof; ``GAVE_UP`` means that a limit was reached."""

    status: Status
    path: str = ""
    """The solution in the letters u, d, l, r, in capitals where a box is pushed."""
    nodes: int = 0
    optimal: bool = False
    """True where no solution has fewer moves."""

    @property
    def solved(self) -> bool:
        """True where there is a solution."""
        return self.status is Status.SOLVED

    @property
    def moves(self) -> int:
        """Steps of the solution."""
        return len(self.path)

    @property
    def pushes(self) -> int:
        """Steps of the solution that push a box."""
        return sum(letter.isupper() for letter in self.path)


def solve(
    text: str, *, weight: int = 1, node_limit: int | None = None, time_limit: float | None = None
) -> Result:
    """Solve a level in XSB (a closed rectangle, see `levels.normalize`).

    Args:
        text: The level.
        weight: 1 for the fewest moves; more for a quicker search.
        node_limit: Give up after that many positions.
        time_limit: Give up after that many seconds; the result then depends on the machine.
    """
    return _Search(text, weight).run(node_limit, time_limit)


def plan(text: str, *, patience: int = 2_000, node_limit: int | None = None) -> Result:
    """The shortest solution if it is found within ``patience`` positions, else a good one.

    Deterministic: it uses no clock. ``nodes`` counts both searches.
    """
    first = solve(text, node_limit=patience)
    if first.status is not Status.GAVE_UP:
        return first
    second = solve(text, weight=FAST_WEIGHT, node_limit=node_limit)
    return replace(second, nodes=first.nodes + second.nodes)


def pushes(maze: Maze, boxes: int, player: int) -> Iterator[tuple[int, int, int]]:
    """Every push that can be made: its steps with the walk to it, the box, and where the box goes."""
    row = maze.row
    free = maze.floor & ~boxes
    landing = free & maze.alive
    right, left = boxes & landing >> 1, boxes & landing << 1
    down, up = boxes & landing >> row, boxes & landing << row
    stands = right >> 1 | left << 1 | down >> row | up << row
    steps, ring, seen = 1, player, player
    while ring:
        standing = ring & stands
        while standing:
            cell = standing & -standing
            standing ^= cell
            if cell << 1 & right:
                yield steps, cell << 1, cell << 2
            if cell >> 1 & left:
                yield steps, cell >> 1, cell >> 2
            if cell << row & down:
                yield steps, cell << row, cell << row + row
            if cell >> row & up:
                yield steps, cell >> row, cell >> row + row
        ring = (ring << 1 | ring >> 1 | ring << row | ring >> row) & free & ~seen
        seen |= ring
        steps += 1


class _Search:
    """One search: the open nodes in buckets by priority, the latest of a bucket first."""

    def __init__(self, text: str, weight: int) -> None:
        self.maze, boxes, player = read_maze(text)
        self.weight = weight
        self.shift = len(text)
        self.nodes: list[tuple[int, int, int, int]] = []  # boxes, player, moves so far, parent
        self.open: list[list[int]] = []
        self.lowest = 0
        self.least: dict[int, int] = {}  # fewest moves known to a position
        self.estimates: dict[int, int] = {boxes: FAR if any_frozen(self.maze, boxes) else self.match(boxes)}
        self.add(boxes, player, 0, -1, self.estimates[boxes])

    def run(self, node_limit: int | None, time_limit: float | None) -> Result:
        deadline = None if time_limit is None else time.monotonic() + time_limit
        count = 0
        targets = self.maze.targets
        while (index := self.next_node()) is not None:
            count += 1
            if self.nodes[index][0] == targets:
                return Result(Status.SOLVED, self.path(index), count, self.weight == 1)
            if count == node_limit or (
                deadline is not None and not count & 63 and time.monotonic() > deadline
            ):
                return Result(Status.GAVE_UP, nodes=count)
            self.expand(index)
        return Result(Status.UNSOLVABLE, nodes=count)

    def next_node(self) -> int | None:
        """The most promising open node to which no shorter way was found since it was added."""
        buckets, nodes = self.open, self.nodes
        while self.lowest < len(buckets):
            bucket = buckets[self.lowest]
            while bucket:
                index = bucket.pop()
                boxes, player, moves, _ = nodes[index]
                if self.least[boxes << self.shift | player] == moves:
                    return index
            self.lowest += 1
        return None

    def expand(self, index: int) -> None:
        boxes, player, so_far, _ = self.nodes[index]
        estimates = self.estimates
        for steps, old, new in pushes(self.maze, boxes, player):
            after = boxes ^ old ^ new
            estimate = estimates.get(after)
            if estimate is None:
                estimate = FAR if is_frozen(self.maze, after, new) else self.match(after)
                estimates[after] = estimate
            if estimate < FAR:
                self.add(after, old, so_far + steps, index, estimate)

    def add(self, boxes: int, player: int, moves: int, parent: int, estimate: int) -> None:
        if estimate >= FAR:
            return
        key = boxes << self.shift | player
        if self.least.get(key, FAR) <= moves:
            return
        self.least[key] = moves
        priority = moves + self.weight * estimate
        while priority >= len(self.open):
            self.open.append([])
        self.open[priority].append(len(self.nodes))
        self.nodes.append((boxes, player, moves, parent))
        self.lowest = min(self.lowest, priority)

    def match(self, boxes: int) -> int:
        """A lower bound on the pushes that are left."""
        distances = self.maze.distances
        return cheapest_matching([distances[box.bit_length() - 1] for box in split(boxes)])

    def path(self, index: int) -> str:
        """The moves from the start to a node."""
        parts: list[str] = []
        maze = self.maze
        while (parent := self.nodes[index][3]) >= 0:
            before, start, _, _ = self.nodes[parent]
            after, player, _, _ = self.nodes[index]
            landed = after & ~before
            letter, stand = _push_letter(player, landed, maze.row)
            parts.append(walk(start, stand, maze.floor & ~before, maze.row) + letter)
            index = parent
        return "".join(reversed(parts))


def _push_letter(box: int, landed: int, row: int) -> tuple[str, int]:
    """Which way a box went, and where the player stood to push it."""
    if landed == box << row:
        return "D", box >> row
    if landed == box >> row:
        return "U", box << row
    return ("R", box >> 1) if landed == box << 1 else ("L", box << 1)
