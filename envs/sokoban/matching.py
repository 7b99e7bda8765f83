"""Minimum-cost assignment of boxes to targets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, permutations
from operator import itemgetter


def cheapest_matching(costs: Sequence[Sequence[int]]) -> int:
    """Return the minimum assignment cost of a square matrix."""
    size = len(costs)
    if size == 1:
        return costs[0][0]
    if size in _ORDERS:
        flat = tuple(chain.from_iterable(costs))
        sums: list[int] = [sum(pick(flat)) for pick in _ORDERS[size]]
        return min(sums)
    return hungarian(costs)


_ORDERS = {
    size: [
        itemgetter(*(row * size + column for row, column in enumerate(order)))
        for order in permutations(range(size))
    ]
    for size in (2, 3, 4)
}
"""Up to four rows it is quicker to try every order: each entry picks one from the costs in a line."""


def hungarian(costs: Sequence[Sequence[int]]) -> int:
    """The same for any size: rows enter one by one, each along a cheapest augmenting path.

    The prices of rows and columns keep every reduced cost at zero or above.
    """
    size = len(costs)
    row_price, column_price = [0] * (size + 1), [0] * (size + 1)
    taken_by = [0] * (size + 1)  # the row that holds a column, from 1; column 0 holds the row that enters
    for entering in range(1, size + 1):
        taken_by[0] = entering
        _augment(costs, row_price, column_price, taken_by)
    return sum(costs[taken_by[column] - 1][column - 1] for column in range(1, size + 1))


def _augment(
    costs: Sequence[Sequence[int]], row_price: list[int], column_price: list[int], taken_by: list[int]
) -> None:
    size = len(costs)
    slack: list[float] = [float("inf")] * (size + 1)
    came_from = [0] * (size + 1)
    done = [False] * (size + 1)
    column = 0
    while taken_by[column]:
        done[column] = True
        row = taken_by[column]
        line, price = costs[row - 1], row_price[row]
        nearest, best = 0, float("inf")
        for other in range(1, size + 1):
            if done[other]:
                continue
            reduced = line[other - 1] - price - column_price[other]
            if reduced < slack[other]:
                slack[other], came_from[other] = reduced, column
            if slack[other] < best:
                nearest, best = other, slack[other]
        for other in range(size + 1):
            if done[other]:
                row_price[taken_by[other]] += int(best)
                column_price[other] -= int(best)
            else:
                slack[other] -= best
        column = nearest
    while column:
        taken_by[column] = taken_by[came_from[column]]
        column = came_from[column]
