"""Counts exactly the fields that fit the visible board, and in how many of them each cell has a mine.

Cells under the same constraints are interchangeable: they form a box, and only the number of mines in a
box matters. Boxes that share no constraint, directly or through others, are counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Constraint = tuple[int, int]
"""A set of cells as a bit mask, and how many mines are among them."""

Table = dict[int, tuple[int, dict[int, int]]]
"""By number of mines: the ways to place them, and for each box the ways with a mine in a given cell."""

_MAX_STEPS = 50_000


class TooHard(Exception):
    """Counting would take too long."""


def cells_of(mask: int) -> list[int]:
    """The cells of a set, in order."""
    return [cell for cell in range(mask.bit_length()) if mask >> cell & 1]


def mine_counts(closed: int, constraints: Sequence[Constraint], mines: int) -> tuple[dict[int, int], int]:
    """For each closed cell the number of fitting fields with a mine there, and the number of all."""
    boxes = _boxes(constraints)
    table: Table = {0: (1, {})}
    for component in _components(boxes, constraints):
        table = _product(table, _Search(component, boxes, constraints).table())
    free = closed
    for box in boxes:
        free &= ~box
    return _with_rest(table, boxes, free, mines)


def _boxes(constraints: Sequence[Constraint]) -> list[int]:
    boxes = [0]
    for mask, _ in constraints:
        boxes = [piece for box in boxes for piece in (box & mask, box & ~mask) if piece]
        fresh = mask
        for box in boxes:
            fresh &= ~box
        boxes += [fresh] if fresh else []
    return boxes


def _components(boxes: Sequence[int], constraints: Sequence[Constraint]) -> list[list[int]]:
    """Numbers of the boxes that hang together, each part in the order constraints reach them."""
    boxes_left = list(range(len(boxes)))
    components = []
    while boxes_left:
        reach = boxes[boxes_left[0]]
        component: list[int] = []
        while added := [number for number in boxes_left if boxes[number] & reach and number not in component]:
            component += added
            for mask, _ in constraints:
                reach |= mask if mask & reach else 0
        components.append(component)
        boxes_left = [number for number in boxes_left if number not in component]
    return components


class _Search:
    """All ways to put numbers of mines into the boxes of one part."""

    def __init__(self, part: list[int], boxes: Sequence[int], constraints: Iterable[Constraint]) -> None:
        self.part = part
        self.sizes = [boxes[number].bit_count() for number in part]
        inside = [(mask, count) for mask, count in constraints if any(mask & boxes[n] for n in part)]
        self.need = [count for _, count in inside]
        self.room = [mask.bit_count() for mask, _ in inside]
        self.touches = [[i for i, (mask, _) in enumerate(inside) if mask & boxes[n]] for n in part]
        self.chosen: list[int] = []
        self.found: Table = {}
        self.steps = 0

    def table(self) -> Table:
        """The result of the whole search."""
        self._extend()
        return self.found

    def _extend(self) -> None:
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise TooHard
        index = len(self.chosen)
        if index == len(self.part):
            self._record()
            return
        size, touched = self.sizes[index], self.touches[index]
        for i in touched:
            self.room[i] -= size
        for count in range(size + 1):
            if all(0 <= self.need[i] - count <= self.room[i] for i in touched):
                self._descend(count, touched)
        for i in touched:
            self.room[i] += size

    def _descend(self, count: int, touched: list[int]) -> None:
        for i in touched:
            self.need[i] -= count
        self.chosen.append(count)
        self._extend()
        self.chosen.pop()
        for i in touched:
            self.need[i] += count

    def _record(self) -> None:
        ways = math.prod(map(math.comb, self.sizes, self.chosen))
        before, mined = self.found.get(sum(self.chosen), (0, dict.fromkeys(self.part, 0)))
        for number, size, count in zip(self.part, self.sizes, self.chosen, strict=True):
            mined[number] += ways * count // size
        self.found[sum(self.chosen)] = (before + ways, mined)


def _product(first: Table, second: Table) -> Table:
    """The table of two parts together."""
    result: Table = {}
    for n, (ways_n, mined_n) in first.items():
        for m, (ways_m, mined_m) in second.items():
            ways, mined = result.get(n + m, (0, dict.fromkeys([*mined_n, *mined_m], 0)))
            for box, count in mined_n.items():
                mined[box] += count * ways_m
            for box, count in mined_m.items():
                mined[box] += count * ways_n
            result[n + m] = (ways + ways_n * ways_m, mined)
    return result


def _with_rest(table: Table, boxes: Sequence[int], free: int, mines: int) -> tuple[dict[int, int], int]:
    """Spread the remaining mines over the cells under no constraint, and count per cell."""
    num_free = free.bit_count()
    total = in_rest = 0
    in_box = dict.fromkeys(range(len(boxes)), 0)
    for used, (ways, mined) in table.items():
        spread = math.comb(num_free, mines - used) if used <= mines else 0
        total += ways * spread
        in_rest += ways * math.comb(num_free - 1, mines - used - 1) if num_free and used < mines else 0
        for box, count in mined.items():
            in_box[box] += count * spread
    counts = {cell: in_box[number] for number, box in enumerate(boxes) for cell in cells_of(box)}
    counts.update(dict.fromkeys(cells_of(free), in_rest))
    return dict(sorted(counts.items())), total
