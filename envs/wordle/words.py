"""The word list and the marks of a guess."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

LENGTH = 5


@lru_cache(maxsize=1)
def word_list() -> tuple[str, ...]:
    """All words, in alphabetical order, read on first use."""
    text = resources.files("rollgym.envs.wordle").joinpath("words.txt").read_text("utf-8")
    return tuple(text.split())


@lru_cache(maxsize=1)
def word_set() -> frozenset[str]:
    """All words, for membership tests."""
    return frozenset(word_list())


def mark(guess: str, hidden: str) -> str:
    """A mark per letter: G right place, Y elsewhere in the word, - not (or not once more) in it.

    A letter is marked as often as the hidden word has it: right places first, then from left to right.
    """
    marks = ["G" if a == b else "-" for a, b in zip(guess, hidden, strict=True)]
    spare = [b for a, b in zip(guess, hidden, strict=True) if a != b]
    for position, letter in enumerate(guess):
        if marks[position] == "-" and letter in spare:
            marks[position] = "Y"
            spare.remove(letter)
    return "".join(marks)
