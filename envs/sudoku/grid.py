"""Sudoku grids: solving, and puzzles with exactly one solution.

A grid is a list of numbers, row by row, with 0 for a blank. Sets of digits are bit masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

Grid = list[int]


@lru_cache(maxsize=4)
def units_of(size: int) -> tuple[tuple[int, int, int], ...]:
    """For each cell the numbers of its row, its column and its block among all units."""
    box = math.isqrt(size)
    return tuple(
        (row, size + column, 2 * size + row // box * box + column // box)
        for row in range(size)
        for column in range(size)
    )


class Solver:
    """Fills a grid by trying digits (in random order, if given a generator) where the fewest are left."""

    def __init__(self, grid: Sequence[int], rng: np.random.Generator | None = None) -> None:
        self.grid = list(grid)
        self.size = math.isqrt(len(self.grid))
        self._rng = rng
        self._units = units_of(self.size)
        self._free: list[int] = [(2 << self.size) - 2] * (3 * self.size)
        for cell, digit in enumerate(self.grid):
            self._toggle(cell, digit)
        self._blanks = [cell for cell, digit in enumerate(self.grid) if not digit]

    def options(self, cell: int) -> int:
        """The digits that are in none of the cell's row, column and block."""
        a, b, c = self._units[cell]
        return self._free[a] & self._free[b] & self._free[c]

    def solve(self) -> bool:
        """Fill the grid; False, and the grid unchanged, where that is impossible."""
        if not self._blanks:
            return True
        index = self._narrowest()
        cell = self._blanks[index]
        self._blanks[index] = self._blanks[-1]
        self._blanks.pop()
        for digit in self._in_order(self.options(cell)):
            self.put(cell, digit)
            if self.solve():
                return True
            self.put(cell, 0)
        self._blanks.append(cell)
        return False

    def put(self, cell: int, digit: int) -> None:
        """Write a digit, or with 0 remove the one that is there."""
        self._toggle(cell, self.grid[cell] or digit)
        self.grid[cell] = digit

    def _toggle(self, cell: int, digit: int) -> None:
        for unit in self._units[cell] if digit else ():
            self._free[unit] ^= 1 << digit

    def _narrowest(self) -> int:
        narrowest, fewest = 0, self.size + 1
        for index, cell in enumerate(self._blanks):
            count = self.options(cell).bit_count()
            if count < fewest:
                narrowest, fewest = index, count
                if count <= 1:
                    break
        return narrowest

    def _in_order(self, mask: int) -> list[int]:
        digits = digits_of(mask)
        return digits if self._rng is None else [digits[i] for i in self._rng.permutation(len(digits))]


def coordinates(cell: int, size: int) -> str:
    """Return the row and column of a cell, both from 1."""
    return f"{cell // size + 1} {cell % size + 1}"


def digits_of(mask: int) -> list[int]:
    """The digits of a set, in order."""
    return [digit for digit in range(1, mask.bit_length()) if mask >> digit & 1]


def solution(grid: Sequence[int]) -> Grid | None:
    """A solution of the grid, or None."""
    solver = Solver(grid)
    return solver.grid if solver.solve() else None


def full_grid(rng: np.random.Generator, size: int) -> Grid:
    """A random filled grid."""
    solver = Solver([0] * (size * size), rng)
    solver.solve()
    return solver.grid


def puzzle_from(full: Sequence[int], blanks: int, rng: np.random.Generator) -> Grid | None:
    """Blank cells of a filled grid in random order while its solution stays the only one.

    Returns None if the order does not allow that many blanks.
    """
    grid = list(full)
    for cell in map(int, rng.permutation(len(grid))):
        if grid.count(0) == blanks:
            break
        digit, grid[cell] = grid[cell], 0
        if _has_other(grid, cell, digit):
            grid[cell] = digit
    return grid if grid.count(0) == blanks else None


def _has_other(grid: Sequence[int], cell: int, digit: int) -> bool:
    """True where the grid has a solution with another digit in the cell."""
    others = digits_of(Solver(grid).options(cell) & ~(1 << digit))
    return any(solution([*grid[:cell], other, *grid[cell + 1 :]]) for other in others)
