"""An expert for Mastermind: the guess that leaves the fewest codes in the worst case."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgym.core.agent import SoloAgent
from rollgym.core.seeding import derive_rng
from rollgym.envs.mastermind.codes import SYMBOLS, code_at, count_codes

Array = NDArray[Any]

_PAIRS = 400_000
"""Maximum (guess, code) pairs per decision; above it both sides are sampled."""


@lru_cache(maxsize=4)
def _all_codes(length: int, digits: int, duplicates: bool) -> Array:
    """Every code as a row of digit numbers, in a fixed shuffled order so that a prefix is a sample."""
    count = count_codes(length, digits, duplicates)
    order = derive_rng("mastermind expert", count).permutation(count)
    text = "".join(code_at(int(number), length, digits, duplicates) for number in order)
    flat = np.frombuffer(text.encode(), dtype=np.uint8) - ord(SYMBOLS[0])
    return flat.reshape(count, length)


def _tallies(codes: Array, digits: int) -> Array:
    """How often each digit occurs in each code."""
    return np.stack([(codes == digit).sum(axis=1) for digit in range(digits)], axis=1).astype(np.uint8)


def _answers(guesses: Array, codes: Array, digits: int) -> Array:
    """The pegs of every guess for every code, as one number: black * (length + 1) + common."""
    length = codes.shape[1]
    black = np.zeros((len(guesses), len(codes)), dtype=np.int32)
    for position in range(length):
        black += guesses[:, position, None] == codes[None, :, position]
    common = np.zeros_like(black)
    guess_tallies, code_tallies = _tallies(guesses, digits), _tallies(codes, digits)
    for digit in range(digits):
        common += np.minimum(guess_tallies[:, digit, None], code_tallies[None, :, digit])
    answers: Array = black * (length + 1) + common
    return answers


def _worst_cases(guesses: Array, codes: Array, digits: int) -> Array:
    """For each guess, how many of the codes may be left after the least helpful answer."""
    kinds = (codes.shape[1] + 1) ** 2
    answers = _answers(guesses, codes, digits)
    answers += np.arange(len(guesses), dtype=np.int32)[:, None] * kinds
    counts = np.bincount(answers.ravel(), minlength=len(guesses) * kinds)
    worst: Array = counts.reshape(len(guesses), kinds).max(axis=1)
    return worst


class MastermindExpert(SoloAgent):
    """Knuth's minimax rule, on samples of guesses and codes where there are too many for all pairs."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The opening guess, the only code left, or the best splitter."""
        digits = int(info["digits"])
        codes = _all_codes(int(info["length"]), digits, bool(info["duplicates"]))
        if not info["history"]:
            return _opening(int(info["length"]), digits, bool(info["duplicates"]))
        candidates = codes
        for guess, black, white in info["history"]:
            row = np.array([[SYMBOLS.index(symbol) for symbol in guess]], dtype=np.uint8)
            answer = black * (codes.shape[1] + 1) + black + white
            candidates = candidates[_answers(row, candidates, digits)[0] == answer]
        if len(candidates) <= 2 or info["guesses_left"] == 1:
            return _text(candidates[0])
        return _text(_best_guess(candidates, codes, digits))


def _opening(length: int, digits: int, duplicates: bool) -> str:
    """``1122`` and the like: pairs of equal digits, or all different where codes have no repeats."""
    return "".join(SYMBOLS[(index // 2 if duplicates else index) % digits] for index in range(length))


def _best_guess(candidates: Array, codes: Array, digits: int) -> Array:
    sample = candidates[: int(_PAIRS**0.5)]
    # Codes that may be right come first, so that they win ties.
    pool = np.concatenate([sample, codes[: _PAIRS // len(sample)]])
    best: Array = pool[int(np.argmin(_worst_cases(pool, sample, digits)))]
    return best


def _text(row: Array) -> str:
    return "".join(SYMBOLS[int(digit)] for digit in row)
