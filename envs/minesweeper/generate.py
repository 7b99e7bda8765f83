"""Random fields of mines, and a test whether one can be cleared without guessing."""

from __future__ import annotations

import numpy as np

from rollgym.envs.minesweeper.grid import Field, neighbors
from rollgym.envs.minesweeper.logic import safe_cells


def random_field(rng: np.random.Generator, rows: int, columns: int, mines: int) -> Field:
    """A random start cell, and mines anywhere but on it and next to it."""
    start = int(rng.integers(rows * columns))
    clear = {start, *neighbors(rows, columns)[start]}
    free = [cell for cell in range(rows * columns) if cell not in clear]
    return Field(rows, columns, frozenset(map(int, rng.choice(free, size=mines, replace=False))), start)


def closed_at_start(field: Field) -> set[int]:
    """The cells that are still closed once the start cell has been opened."""
    cells = set(range(field.rows * field.columns))
    return cells - set(field.opened_by(field.start, cells))


def needs_no_guess(field: Field) -> bool:
    """True where opening cells that are provably safe, and no others, clears the whole field."""
    closed = closed_at_start(field)
    while len(closed) > len(field.mines):
        safe = safe_cells(field.view(closed), len(field.mines))
        if not safe:
            return False
        for cell in safe:
            closed.difference_update(field.opened_by(cell, closed))
    return True
