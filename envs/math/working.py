"""Written working for problems of one operation: short steps, each of which a small policy can learn.

Held-out problems consist of steps that training problems share: sums of digits, and multiples of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

LEVEL = 1
"""The level whose kinds have written working."""


def working(kind: str, values: Mapping[str, Any]) -> str:
    """The steps to the answer, in one line, without the answer itself.

    Example:
        >>> working("addition", {"a": 46, "b": 19})
        '6 + 9 = 15, 4 + 1 + 1 = 6'
    """
    return _WORKING[kind](values["a"], values["b"])


def _sum(a: int, b: int) -> str:
    """Ones first, then tens with the carry."""
    carry = (a % 10 + b % 10) // 10
    ones = f"{a % 10} + {b % 10} = {a % 10 + b % 10}"
    return f"{ones}, {a // 10} + {b // 10} + {carry} = {a // 10 + b // 10 + carry}"


def _difference(a: int, b: int) -> str:
    """Ones first, with ten borrowed where needed, then tens."""
    borrow = int(a % 10 < b % 10)
    ones = a % 10 + 10 * borrow
    tens = a // 10 - borrow
    return f"{ones} - {b % 10} = {ones - b % 10}, {tens} - {b // 10} = {tens - b // 10}"


def _product(a: int, b: int) -> str:
    """The multiples of the larger number, counted up to the smaller one."""
    count, number = sorted((a, b))
    return ", ".join(f"{k}: {k * number}" for k in range(1, count + 1))


_WORKING: Mapping[str, Callable[[int, int], str]] = {
    "addition": _sum,
    "subtraction": _difference,
    "multiplication": _product,
    "missing number": lambda a, b: _difference(b, a),
}
