"""Random choices from a stream of numbers, quick enough for a million products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rollgym.core.seeding import derive_rng

_T = TypeVar("_T")

BLOCK, WIDTH = 1000, 128
"""Products per generator, and random numbers per product: more than any needs."""


class Rng:
    """Choices made one after another from numbers between 0 and 1."""

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Iterator[float]) -> None:
        self._numbers = numbers

    def below(self, limit: int) -> int:
        """A number from 0 to below the limit."""
        return int(next(self._numbers) * limit)

    def between(self, low: float, high: float) -> float:
        """A number in the range, more often a low one."""
        number = next(self._numbers)
        return low + (high - low) * number * number

    def chance(self, share: float) -> bool:
        """True in that share of cases."""
        return next(self._numbers) < share

    def pick(self, items: Sequence[_T]) -> _T:
        """One of the items."""
        return items[int(next(self._numbers) * len(items))]

    def pick_early(self, items: Sequence[_T]) -> _T:
        """One of the items, more often one of the first."""
        return items[int(self.between(0, len(items)))]

    def some(self, items: Sequence[_T], count: int) -> list[_T]:
        """Draw ``count`` different items (or all), in random order."""
        pool = list(items)
        count = min(count, len(pool))
        for index in range(count):
            other = index + int(next(self._numbers) * (len(pool) - index))
            pool[index], pool[other] = pool[other], pool[index]
        return pool[:count]

    def in_order(self, items: Sequence[_T], count: int) -> list[_T]:
        """Draw ``count`` different items (or all), in their original order."""
        return [items[index] for index in sorted(self.some(range(len(items)), count))]


def numbered_draws(size: int, *parts: object) -> Iterator[Rng]:
    """The draws of products 0, 1, 2, …: those of a product depend on its number and the parts alone."""
    for block in range((size + BLOCK - 1) // BLOCK):
        rows = derive_rng(*parts, block).random((BLOCK, WIDTH))
        for row in rows[: size - block * BLOCK]:
            yield Rng(iter(row.tolist()))


def endless_draws(*parts: object) -> Rng:
    """Draws without end, a function of the parts alone."""
    rng = derive_rng(*parts)

    def numbers() -> Iterator[float]:
        while True:
            yield from rng.random(256).tolist()

    return Rng(numbers())
