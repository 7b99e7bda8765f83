"""Boards of 2048 as tuples of rows, with 0 for an empty cell: sliding, merging, new tiles."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

Row = tuple[int, ...]
Board = tuple[Row, ...]

DIRECTIONS = ("Up", "Down", "Left", "Right")
CHANCE_OF_FOUR = 0.1


@lru_cache(maxsize=200_000)
def slide(row: Row) -> tuple[Row, int]:
    """A row after sliding to its beginning, and the sum of the tiles made by merging.

    Equal neighbors merge from the beginning on; a tile made in this move does not merge again.
    """
    tiles = [tile for tile in row if tile]
    result: list[int] = []
    gained = index = 0
    while index < len(tiles):
        if index + 1 < len(tiles) and tiles[index] == tiles[index + 1]:
            result.append(2 * tiles[index])
            gained += 2 * tiles[index]
            index += 1
        else:
            result.append(tiles[index])
        index += 1
    return (*result, *[0] * (len(row) - len(result))), gained


def turned(board: Board) -> Board:
    """Rows as columns."""
    return tuple(zip(*board, strict=True))


def shift(board: Board, direction: str) -> tuple[Board, int]:
    """The board after a move, before a new tile comes, and the sum of the tiles made by merging."""
    lines = turned(board) if direction in ("Up", "Down") else board
    back = direction in ("Down", "Right")
    slid = [slide(line[::-1] if back else line) for line in lines]
    moved = tuple(line[::-1] if back else line for line, _ in slid)
    gained = sum(points for _, points in slid)
    return (turned(moved) if direction in ("Up", "Down") else moved), gained


def legal_moves(board: Board) -> list[str]:
    """The directions that change the board."""
    return [direction for direction in DIRECTIONS if shift(board, direction)[0] != board]


def empty_cells(board: Board) -> list[tuple[int, int]]:
    """Row and column of every cell without a tile."""
    return [(r, c) for r, row in enumerate(board) for c, tile in enumerate(row) if not tile]


def with_tile(board: Board, row: int, column: int, tile: int) -> Board:
    """The board with a tile put into a cell."""
    line = board[row]
    return (*board[:row], (*line[:column], tile, *line[column + 1 :]), *board[row + 1 :])


def with_new_tile(board: Board, rng: np.random.Generator) -> Board:
    """The board with a 2 (nine times in ten) or a 4 in a random empty cell."""
    cells = empty_cells(board)
    row, column = cells[int(rng.integers(len(cells)))]
    return with_tile(board, row, column, 4 if rng.random() < CHANCE_OF_FOUR else 2)


def largest(board: Board) -> int:
    """The greatest tile."""
    return max(map(max, board))
