"""Boxes of a tensor: a range of each dimension. A flat range is a few boxes, each in one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A range of each dimension of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """Return the common box; None if there is none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(starts, sizes)

    def rows_of(self, inner: Box) -> Box:
        """Return the part of this box, which is in one piece, that an inner one needs and is so too."""
        dimension = next((d for d, size in enumerate(self.sizes) if size > 1), 0)
        return Box(
            _replaced(self.offsets, dimension, inner.offsets), _replaced(self.sizes, dimension, inner.sizes)
        )

    def slices(self, within: Box | None = None) -> tuple[slice, ...]:
        """Return an index of this box in a tensor, or in one that holds another box of it."""
        origin = within.offsets if within is not None else (0,) * len(self.offsets)
        return tuple(
            slice(at - start, at - start + size)
            for at, size, start in zip(self.offsets, self.sizes, origin, strict=True)
        )

    def flat_range(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the flat range that this box covers in a tensor of a shape; None if it has several parts."""
        if not self.numel:
            return 0, 0
        dimension = next((d for d, size in enumerate(self.sizes) if size > 1), len(shape))
        if any(
            size != whole
            for size, whole in zip(self.sizes[dimension + 1 :], shape[dimension + 1 :], strict=True)
        ):
            return None
        start = sum(at * math.prod(shape[d + 1 :]) for d, at in enumerate(self.offsets))
        return start, start + self.numel


def _replaced(values: tuple[int, ...], at: int, by: tuple[int, ...]) -> tuple[int, ...]:
    return (*values[:at], *by[at : at + 1], *values[at + 1 :])


def boxes_of_range(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes that a flat range of a tensor consists of, in order; each is in one piece."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    rest = tuple(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        yield from _in_row(last, start - last * row, stop - last * row, rest)
        return
    if start < first * row:
        yield from _in_row(first - 1, start - (first - 1) * row, row, rest)
    if first < last:
        yield Box((first, *(0 for _ in rest)), (last - first, *rest))
    if last * row < stop:
        yield from _in_row(last, 0, stop - last * row, rest)


def _in_row(number: int, start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    for box in boxes_of_range(start, stop, shape):
        yield Box((number, *box.offsets), (1, *box.sizes))
