"""Cells of a grid, numbered row by row, and a field of mines on one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

HIDDEN, FLAG, EMPTY, MINE = "#", "F", ".", "*"


@lru_cache(maxsize=16)
def neighbors(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """For each cell the up to eight cells around it."""
    steps = [(dr, dc) for dr in (-1, 0, 1) for dc in (-1, 0, 1) if dr or dc]
    return tuple(
        tuple((r + dr) * columns + c + dc for dr, dc in steps if 0 <= r + dr < rows and 0 <= c + dc < columns)
        for r in range(rows)
        for c in range(columns)
    )


@dataclass(frozen=True, slots=True)
class Field:
    """Mine positions and the cell opened at the start."""

    rows: int
    columns: int
    mines: frozenset[int]
    start: int

    def symbol(self, cell: int) -> str:
        """Symbol of an opened cell: a mine, the number of mines around it, or a dot for none."""
        if cell in self.mines:
            return MINE
        count = sum(other in self.mines for other in neighbors(self.rows, self.columns)[cell])
        return str(count) if count else EMPTY

    def opened_by(self, cell: int, closed: Collection[int]) -> list[int]:
        """The closed cells that opening one uncovers: a cell with no mine around it opens those around it."""
        opened, queue = {cell}, [cell]
        for current in queue:
            if self.symbol(current) == EMPTY:
                around = neighbors(self.rows, self.columns)[current]
                uncovered = [other for other in around if other in closed and other not in opened]
                opened.update(uncovered)
                queue.extend(uncovered)
        return queue

    def view(self, closed: Collection[int], flags: Collection[int] = ()) -> list[str]:
        """The visible board, a string for each row."""
        cells = range(self.rows * self.columns)
        text = "".join(
            FLAG if cell in flags else HIDDEN if cell in closed else self.symbol(cell) for cell in cells
        )
        return [text[row * self.columns : (row + 1) * self.columns] for row in range(self.rows)]
