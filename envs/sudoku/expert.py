"""An expert for Sudoku: solves the given grid by search and fills it in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rollgym.core.agent import SoloAgent
from rollgym.envs.sudoku.grid import coordinates, solution


@lru_cache(maxsize=256)
def _solved(given: str) -> str:
    grid = solution([int(symbol) for symbol in given.replace(".", "0")])
    assert grid is not None, "the given grid has no solution"
    return "".join(map(str, grid))


class SudokuExpert(SoloAgent):
    """Clears wrong digits, then fills the first blank with its digit in the only solution."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """Clear the first wrong digit, or fill the first blank."""
        board, size = "".join(info["board"]), len(info["board"])
        solved = _solved("".join(info["given"]))
        for cell, (current, digit) in enumerate(zip(board, solved, strict=True)):
            if current not in (".", digit):
                return f"clear {coordinates(cell, size)}"
        cell = board.index(".")
        return f"fill {coordinates(cell, size)} {solved[cell]}"
