"""The expert of Wordle: keep the words that fit, guess the word that separates them best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import log
from typing import Any

from rollgym.core.agent import SoloAgent
from rollgym.envs.wordle.words import mark, word_list

FIRST = "raise"
"""The opening; finding the best one each time would take seconds."""
_FEW = 24
"""With no more words left than this, every word of the list is tried as a guess."""


class WordleExpert(SoloAgent):
    """Guesses the word with the highest expected information about the words that still fit.

    It finds each word of the list with five guesses or fewer.
    """

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The next guess."""
        if not info["guesses"]:
            return FIRST
        fitting = tuple(word for word in word_list() if fits(word, info["guesses"]))
        return best_guess(fitting) if fitting else FIRST


def fits(word: str, guesses: Sequence[Sequence[str]]) -> bool:
    """Whether the word is consistent with all these marks."""
    return all(mark(guess, word) == marks for guess, marks in guesses)


@lru_cache(maxsize=4096)
def best_guess(fitting: tuple[str, ...]) -> str:
    """The most telling guess; among equals one that may be right."""
    if len(fitting) <= 2:
        return fitting[0]
    guesses = [*fitting, *word_list()] if len(fitting) <= _FEW else fitting
    return max(guesses, key=lambda guess: (round(surprise(guess, fitting), 9), guess in fitting))


def surprise(guess: str, fitting: Sequence[str]) -> float:
    """The entropy of the marks a guess would get."""
    counts = Counter(mark(guess, word) for word in fitting).values()
    return -sum(count / len(fitting) * log(count / len(fitting)) for count in counts)
