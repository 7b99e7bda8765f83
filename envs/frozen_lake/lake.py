"""Maps of the lake, and Gymnasium's own lake made from one.

A map is a tuple of rows in Gymnasium's letters: S start, F frozen, H hole, G goal.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymLake

GYM_RATE = 1 / 3
"""Default success rate of Gymnasium's slippery ice."""
RATE_IS_SETTABLE = "success_rate" in inspect.signature(GymLake.__init__).parameters
_TRIES = 50


def make_lake(rows: Sequence[str], success_rate: float) -> Any:
    """Make Gymnasium's lake with this map; with a rate of 1 the ice is not slippery."""
    options: dict[str, Any] = {"is_slippery": success_rate < 1}
    if success_rate not in (1, GYM_RATE):
        options["success_rate"] = success_rate
    return GymLake(desc=list(rows), **options)


def random_map(rng: np.random.Generator, size: int, frozen_probability: float) -> tuple[str, ...]:
    """A random square map with a way from the top left to the bottom right."""
    frozen = np.ones((size, size), dtype=bool)
    for _ in range(_TRIES):
        frozen = rng.random((size, size)) < frozen_probability
        frozen[0, 0] = frozen[-1, -1] = True
        if has_path(frozen):
            return _letters(frozen)
    # If ice is so rare that solvable maps hardly occur, lay one path explicitly.
    return _letters(_with_path(frozen, rng))


def has_path(frozen: np.ndarray[Any, np.dtype[np.bool_]]) -> bool:
    """Whether a path over ice connects the first cell to the last."""
    rows, columns = frozen.shape
    seen = {(0, 0)}
    frontier = [(0, 0)]
    while frontier:
        row, column = frontier.pop()
        for cell in ((row + 1, column), (row, column + 1), (row - 1, column), (row, column - 1)):
            inside = 0 <= cell[0] < rows and 0 <= cell[1] < columns
            if inside and cell not in seen and frozen[cell]:
                seen.add(cell)
                frontier.append(cell)
    return (rows - 1, columns - 1) in seen


def _with_path(
    frozen: np.ndarray[Any, np.dtype[np.bool_]], rng: np.random.Generator
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    row = column = 0
    for down in rng.permutation([True, False] * (len(frozen) - 1)):
        row, column = (row + 1, column) if down else (row, column + 1)
        frozen[row, column] = True
    return frozen


def _letters(frozen: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[str, ...]:
    cells = np.where(frozen, "F", "H")
    cells[0, 0], cells[-1, -1] = "S", "G"
    return tuple("".join(row) for row in cells)
