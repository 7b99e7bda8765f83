"""Positions of the disks, the moves between them, and how far each position is from the goal.

A position is a tuple with the peg of each disk, the smallest disk first. Pegs are numbered from 0.
"""

from __future__ import annotations

from functools import lru_cache

from rollgym.core.seeding import derive_rng

LETTERS = "ABCDE"
Position = tuple[int, ...]


def tops(position: Position, pegs: int) -> list[int | None]:
    """For each peg its uppermost disk (0 is the smallest), or None."""
    result: list[int | None] = [None] * pegs
    for disk in reversed(range(len(position))):
        result[position[disk]] = disk
    return result


def legal_moves(position: Position, pegs: int) -> list[tuple[int, int]]:
    """All moves (from peg, to peg) that put no disk onto a smaller one."""
    top = tops(position, pegs)
    return [
        (start, end)
        for start, disk in enumerate(top)
        for end, other in enumerate(top)
        if disk is not None and (other is None or disk < other)
    ]


def after(position: Position, start: int, end: int) -> Position:
    """The position after moving the uppermost disk of one peg to another."""
    disk = position.index(start)
    return (*position[:disk], end, *position[disk + 1 :])


@lru_cache(maxsize=8)
def distances(disks: int, pegs: int, goal: int) -> dict[Position, int]:
    """For every position the fewest moves until all disks are on the goal peg."""
    solved = (goal,) * disks
    distance_of = {solved: 0}
    queue = [solved]
    for position in queue:
        for start, end in legal_moves(position, pegs):
            other = after(position, start, end)
            if other not in distance_of:
                distance_of[other] = distance_of[position] + 1
                queue.append(other)
    return distance_of


@lru_cache(maxsize=24)
def starts_of(split: str, disks: int, pegs: int) -> list[tuple[Position, int]]:
    """Every start (position, goal peg) of a split, once: a fifth for dev, a fifth for test, else the rest.

    The largest disk is never on the goal peg.
    """
    count = pegs * (pegs - 1) * pegs ** (disks - 1)
    numbers = derive_rng("tower of hanoi", disks, pegs).permutation(count)
    fifth = count // 5
    parts = {"dev": numbers[:fifth], "test": numbers[fifth : 2 * fifth]}
    return [_start(int(number), disks, pegs) for number in parts.get(split, numbers[2 * fifth :])]


def _start(number: int, disks: int, pegs: int) -> tuple[Position, int]:
    number, goal = divmod(number, pegs)
    number, steps = divmod(number, pegs - 1)
    position = []
    for _ in range(disks - 1):
        number, peg = divmod(number, pegs)
        position.append(peg)
    return (*position, (goal + 1 + steps) % pegs), goal
