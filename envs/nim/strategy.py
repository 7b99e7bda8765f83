"""Perfect play of Nim: leave heaps whose nim-sum is 0 (C. L. Bouton, 1901)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import xor


def nim_sum(heaps: Sequence[int]) -> int:
    """Return the exclusive or of the heap sizes; the player to move can force a win if it is not 0."""
    return reduce(xor, heaps, 0)


def best_move(heaps: Sequence[int]) -> str:
    """Return a move to a nim-sum of 0; where there is none, take one object from the largest heap."""
    total = nim_sum(heaps)
    for heap, size in enumerate(heaps):
        if size ^ total < size:
            return _move(heap, size - (size ^ total))
    return _move(max(range(len(heaps)), key=lambda heap: heaps[heap]), 1)


def _move(heap: int, number: int) -> str:
    return f"{chr(ord('A') + heap)} {number}"
