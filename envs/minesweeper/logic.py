"""Inference from open numbers: safe cells and the risk of the others.

Sets of cells are bit masks. A constraint is a pair: a set of cells, and how many mines are among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations

from rollgym.envs.minesweeper.count import Constraint, TooHard, cells_of, mine_counts
from rollgym.envs.minesweeper.grid import FLAG, HIDDEN, neighbors


def read_board(board: Sequence[str]) -> tuple[int, list[Constraint]]:
    """The closed cells and the constraints of a visible board; flags are ignored."""
    around = neighbors(len(board), len(board[0]))
    text = "".join(board)
    closed = sum(1 << cell for cell, symbol in enumerate(text) if symbol in (HIDDEN, FLAG))
    constraints: dict[Constraint, None] = {}
    for cell, symbol in enumerate(text):
        if symbol.isdigit():
            mask = sum(1 << other for other in around[cell]) & closed
            if mask:
                constraints[mask, int(symbol)] = None
    return closed, list(constraints)


def safe_cells(board: Sequence[str], mines: int) -> list[int]:
    """Cells that cannot hide a mine: by simple rules if those find any, else by counting all cases."""
    closed, constraints = read_board(board)
    easy = _safe_by_rules(constraints)
    if easy:
        return cells_of(easy)
    try:
        counts, _ = mine_counts(closed, constraints, mines)
    except TooHard:
        return []
    return [cell for cell, count in counts.items() if count == 0]


def risks(board: Sequence[str], mines: int) -> dict[int, float]:
    """How likely each closed cell hides a mine, all fields that fit being equally likely."""
    closed, constraints = read_board(board)
    try:
        counts, total = mine_counts(closed, constraints, mines)
    except TooHard:
        return _rough_risks(closed, constraints, mines)
    return {cell: count / total for cell, count in counts.items()}


def _safe_by_rules(constraints: Iterable[Constraint]) -> int:
    safe = mined = 0
    while True:
        open_constraints = _without(constraints, safe, mined)
        new_safe, new_mined = _settled(open_constraints)
        if not new_safe | new_mined:
            new_safe, new_mined = _settled(_differences(open_constraints))
        if not new_safe | new_mined:
            return safe
        safe, mined = safe | new_safe, mined | new_mined


def _without(constraints: Iterable[Constraint], safe: int, mined: int) -> list[Constraint]:
    """The constraints on the cells that are not known yet."""
    reduced = [(mask & ~safe & ~mined, count - (mask & mined).bit_count()) for mask, count in constraints]
    return list(dict.fromkeys(constraint for constraint in reduced if constraint[0]))


def _differences(constraints: Iterable[Constraint]) -> list[Constraint]:
    """Subset rule: if one constraint's cells are contained in another's, return the difference."""
    return [
        (big & ~small, more - fewer)
        for (small, fewer), (big, more) in permutations(constraints, 2)
        if small & ~big == 0
    ]


def _settled(constraints: Iterable[Constraint]) -> tuple[int, int]:
    """Cells that are safe or mined because a constraint has no mine, or nothing but mines."""
    safe = mined = 0
    for mask, count in constraints:
        if count == 0:
            safe |= mask
        elif count == mask.bit_count():
            mined |= mask
    return safe, mined


def _rough_risks(closed: int, constraints: Iterable[Constraint], mines: int) -> dict[int, float]:
    """The greatest share of mines among the constraints of a cell, or of all closed cells."""
    overall = mines / max(1, closed.bit_count())
    shares: dict[int, float] = {}
    for mask, count in constraints:
        for cell in cells_of(mask):
            shares[cell] = max(shares.get(cell, 0.0), count / mask.bit_count())
    return {cell: shares.get(cell, overall) for cell in cells_of(closed)}
