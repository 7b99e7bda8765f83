"""An expert for Minesweeper: opens provably safe cells, otherwise the one with the least risk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import Briefing, SoloAgent
from rollgym.envs.minesweeper.grid import FLAG, HIDDEN
from rollgym.envs.minesweeper.logic import risks, safe_cells


class MinesweeperExpert(SoloAgent):
    """Exact reasoning over the visible board. It clears every field that needs no guess."""

    def start(self, briefing: Briefing) -> None:
        """Forget the cells that were known to be safe."""
        self._safe: list[int] = []

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """Open a cell known to be safe, or the one that is least likely to hide a mine."""
        board, mines = info["board"], int(info["mines"])
        text = "".join(board)
        flagged = [cell for cell, symbol in enumerate(text) if symbol == FLAG]
        if flagged:
            return f"unflag {_coordinates(flagged[0], len(board[0]))}"
        self._safe = [cell for cell in self._safe if text[cell] == HIDDEN] or safe_cells(board, mines)
        if self._safe:
            return f"reveal {_coordinates(self._safe[0], len(board[0]))}"
        chances = risks(board, mines)
        return f"reveal {_coordinates(min(chances, key=lambda cell: (chances[cell], cell)), len(board[0]))}"


def _coordinates(cell: int, columns: int) -> str:
    return f"{cell // columns + 1} {cell % columns + 1}"
