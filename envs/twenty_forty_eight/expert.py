"""A baseline for 2048: looks two moves ahead, over all tiles that may appear in between."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rollgym.core.agent import SoloAgent
from rollgym.envs.twenty_forty_eight.board import (
    CHANCE_OF_FOUR,
    DIRECTIONS,
    Board,
    Row,
    empty_cells,
    shift,
    turned,
    with_tile,
)

_EMPTY, _MERGE, _ORDER = 6.0, 2.0, 1.5
_DEAD = -1000.0


@lru_cache(maxsize=200_000)
def _line_value(line: Row) -> float:
    """Score of a row or column: empty cells, mergeable tiles, monotonic values."""
    ranks = [tile.bit_length() for tile in line]
    steps = [after - before for before, after in zip(ranks, ranks[1:], strict=False)]
    merges = sum(rank for rank, step in zip(ranks, steps, strict=False) if rank and step == 0)
    # The cheaper direction to sort the line, weighted so that disorder among large tiles counts more.
    weight = [max(pair) for pair in zip(ranks, ranks[1:], strict=False)]
    up = sum(w * s for w, s in zip(weight, steps, strict=True) if s > 0)
    down = sum(-w * s for w, s in zip(weight, steps, strict=True) if s < 0)
    return _EMPTY * ranks.count(0) + _MERGE * merges - _ORDER * min(up, down)


def value(board: Board) -> float:
    """Static score of a board."""
    return sum(map(_line_value, board)) + sum(map(_line_value, turned(board)))


def after_moves(board: Board) -> dict[str, Board]:
    """The board after each move that changes it, before a new tile."""
    boards = {direction: shift(board, direction)[0] for direction in DIRECTIONS}
    return {direction: moved for direction, moved in boards.items() if moved != board}


def _best_value(board: Board) -> float:
    return max(map(value, after_moves(board).values()), default=_DEAD)


def _expected_value(board: Board) -> float:
    """The mean, over the tiles that may appear, of the best value one move later."""
    cells = empty_cells(board)
    total = 0.0
    for row, column in cells:
        total += (1 - CHANCE_OF_FOUR) * _best_value(with_tile(board, row, column, 2))
        total += CHANCE_OF_FOUR * _best_value(with_tile(board, row, column, 4))
    return total / len(cells)


class TwentyFortyEightExpert(SoloAgent):
    """Expectimax of depth two: a move, a random tile, a move."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The move with the best expected value; a move that reaches the goal at once."""
        board: Board = tuple(map(tuple, info["board"]))
        moves = after_moves(board)
        for direction, moved in moves.items():
            if any(int(info["goal"]) in row for row in moved):
                return direction
        return max(moves, key=lambda direction: _expected_value(moves[direction]))
