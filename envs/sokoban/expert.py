"""An agent that solves Sokoban by search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import Briefing, SoloAgent
from rollgym.core.messages import ToolCall
from rollgym.envs.sokoban.actions import NAMES, SEPARATOR, move_calls
from rollgym.envs.sokoban.game import Game
from rollgym.envs.sokoban.solver import plan

NODE_LIMIT = 200_000
"""About ten seconds of search; the levels made here take a small part of it."""

_CODES = {"U": 1, "D": 2, "L": 3, "R": 4}


class SokobanExpert(SoloAgent):
    """Plans a whole solution from ``info["board"]`` and follows it; replans when the board differs.

    The plan has the fewest moves where a short search finds it, else a few more (`solver.plan`). On a board
    without a solution, or one too hard to solve, it waits.
    """

    def start(self, briefing: Briefing) -> None:
        """Forget the last episode."""
        self._path = ""
        self._expected = ""

    def calls(self, action: str) -> list[ToolCall]:
        """Return moves as calls of the tool form."""
        return move_calls(action)

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The next actions of the plan, as many as a turn may have."""
        board = str(info["board"])
        if board != self._expected:
            self._path = plan(board, node_limit=NODE_LIMIT).path.upper()
        count = int(info.get("actions_per_turn", 1))
        moves, self._path = self._path[:count], self._path[count:]
        if not moves:
            self._expected = board
            return "noop"
        game = Game(board)
        for letter in moves:
            game.step(_CODES[letter])
        self._expected = game.text
        return SEPARATOR.join(NAMES[_CODES[letter] - 1] for letter in moves)
