"""Countdown puzzles: made so that they can be solved, and solved by trying everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

GREATEST = 50
"""The numbers are from 1 to this."""
TARGETS = (10, 100)
"""Least and greatest target."""

Part = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Some numbers and a target that they can reach."""

    numbers: tuple[int, ...]
    target: int


def random_puzzle(rng: np.random.Generator, count: int) -> Puzzle:
    """A puzzle that can be solved, but not with one or two of its numbers."""
    while True:
        numbers = tuple(int(n) for n in rng.integers(1, GREATEST + 1, size=count))
        target = _random_result(numbers, rng)
        if TARGETS[0] <= target <= TARGETS[1] and not _too_easy(numbers, target):
            return Puzzle(numbers, target)


def solve(numbers: tuple[int, ...], target: int) -> str | None:
    """An expression for the target whose steps are all positive whole numbers, or None."""
    return _search([(number, str(number)) for number in numbers], target, set())


def _random_result(numbers: tuple[int, ...], rng: np.random.Generator) -> int:
    values = list(numbers)
    while len(values) > 1:
        first, second, *rest = (values[i] for i in rng.permutation(len(values)))
        choices = [value for _, value in _joined(first, second)]
        values = [choices[int(rng.integers(len(choices)))], *rest]
    return values[0]


def _too_easy(numbers: tuple[int, ...], target: int) -> bool:
    pairs = ((a, b) for i, a in enumerate(numbers) for b in numbers[:i])
    return target in numbers or any(value == target for a, b in pairs for _, value in _joined(a, b))


def _joined(first: int, second: int) -> Iterator[tuple[str, int]]:
    """Yield the positive whole results of one operation on two numbers; the larger comes first."""
    larger, smaller = max(first, second), min(first, second)
    yield "+", larger + smaller
    yield "*", larger * smaller
    if larger > smaller:
        yield "-", larger - smaller
    if larger % smaller == 0:
        yield "/", larger // smaller


def _search(parts: list[Part], target: int, failed: set[tuple[int, ...]]) -> str | None:
    values = tuple(sorted(value for value, _ in parts))
    if values in failed:
        return None
    for i, first in enumerate(parts):
        if first[0] == target:
            return _without_brackets(first[1])
        for j, second in enumerate(parts[:i]):
            rest = [part for k, part in enumerate(parts) if k not in (i, j)]
            for joined in _joined_parts(first, second):
                expression = _search([joined, *rest], target, failed)
                if expression:
                    return expression
    failed.add(values)
    return None


def _joined_parts(first: Part, second: Part) -> Iterator[Part]:
    larger, smaller = (first, second) if first[0] >= second[0] else (second, first)
    for sign, value in _joined(first[0], second[0]):
        yield value, f"({larger[1]} {sign} {smaller[1]})"


def _without_brackets(text: str) -> str:
    return text[1:-1] if text.startswith("(") else text
