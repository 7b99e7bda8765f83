"""Codes as numbers, the shuffled order behind the splits, and the pegs of a guess."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgym.core.seeding import derive_rng
from rollgym.core.tasks import Task

SYMBOLS = "123456789"


def count_codes(length: int, digits: int, duplicates: bool) -> int:
    """Return the number of codes."""
    return int(digits**length) if duplicates else math.perm(digits, length)


def code_at(number: int, length: int, digits: int, duplicates: bool) -> str:
    """The code with this number, from 0 to ``count_codes() - 1``."""
    pool = list(SYMBOLS[:digits])
    code = ""
    for _ in range(length):
        number, index = divmod(number, len(pool))
        code += pool[index] if duplicates else pool.pop(index)
    return code


@lru_cache(maxsize=4)
def shuffled_numbers(name: str, count: int) -> NDArray[Any]:
    """All numbers below ``count`` in an order that depends on the name alone."""
    return derive_rng("codes", name).permutation(np.arange(count, dtype=np.int32))


def code_index(task: Task, count: int) -> int:
    """Return the index of a task's code in the shuffled order: 10 % dev, 10 % test, then train."""
    tenth = count // 10
    start, end = {"dev": (0, tenth), "test": (tenth, 2 * tenth)}.get(task.split, (2 * tenth, count))
    return start + task.index % (end - start)


def pegs(code: str, guess: str) -> tuple[int, int]:
    """Black and white pegs: digits in their place, and further digits of the code elsewhere."""
    black = sum(a == b for a, b in zip(code, guess, strict=True))
    common = sum(min(code.count(symbol), guess.count(symbol)) for symbol in SYMBOLS)
    return black, common - black
