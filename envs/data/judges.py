"""Judges: compare an agent's answer with the accepted answers of a row.

A judge is a name of `JUDGES`, or ``module:function``, which is called with the row and the answer.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.core.errors import EnvError, UsageError, one_line
from rollgym.core.registry import load_object
from rollgym.core.text import normalize_answer
from rollgym.envs.arguments import check_choice
from rollgym.envs.data.bounded_match import matches

LETTERS = string.ascii_uppercase
_NUMBER = re.compile(r"[-+]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_LETTER = re.compile(r"(?<!\w)\(?([A-Z])(?![\w'’])")


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a row."""

    prompt: str
    answers: tuple[str, ...]
    """Every accepted answer."""
    choices: tuple[str, ...] = ()
    row: Mapping[str, Any] | None = None
    """The mapped columns, for a judge that is a function."""


@dataclass(frozen=True, slots=True)
class Judge:
    """The scoring of answers, and its description for the agent."""

    score: Callable[[Question, str], float]
    """The reward of an answer, from 0 to 1."""
    check: Callable[[Question], None]
    """Raises `ValueError` for a question that this judge cannot score."""
    instruction: str
    """Shown to the agent."""
    readable: Callable[[Question, str], bool] = lambda question, answer: bool(answer.strip())
    """False for an answer without anything to judge, such as one without a number."""


def make_judge(name: str) -> Judge:
    """The judge with a name, or one that calls ``module:function``, which the caller must trust.

    Raises:
        UsageError: There is no such judge or function.
    """
    if ":" in name:
        return _function_judge(name)
    check_choice("judge", name, JUDGES)
    return JUDGES[name]


def last_number(text: str) -> float | None:
    """The last number in a text, or ``None``; commas and underscores between digits are ignored."""
    matches = _NUMBER.findall(text)
    if not matches:
        return None
    value = float(matches[-1].rstrip(",_").replace(",", "").replace("_", ""))
    return value if math.isfinite(value) else None


def chosen_letter(answer: str, choices: Sequence[str]) -> str | None:
    """The letter that an answer chooses: by the letter, or by the text of a choice."""
    texts = [normalize_answer(choice) for choice in choices]
    if texts.count(normalize_answer(answer)) == 1:
        return LETTERS[texts.index(normalize_answer(answer))]
    if re.fullmatch(r"\W*[a-zA-Z]\W*", answer):
        return next(character.upper() for character in answer if character.isascii() and character.isalpha())
    letters = {letter for letter in _LETTER.findall(answer) if LETTERS.index(letter) < (len(choices) or 26)}
    return str(letters.pop()) if len(letters) == 1 else None  # several letters choose nothing


def _exact(question: Question, answer: str) -> float:
    return float(normalize_answer(answer) in {normalize_answer(known) for known in question.answers})


def _number(question: Question, answer: str) -> float:
    value = last_number(answer)
    known = [last_number(text) for text in question.answers]
    return float(value is not None and any(_close(value, number) for number in known if number is not None))


def _close(value: float, known: float) -> bool:
    return math.isclose(value, known, rel_tol=1e-6, abs_tol=1e-9)


def _contains(question: Question, answer: str) -> float:
    text = normalize_answer(answer)
    patterns = [rf"(?<!\w){re.escape(normalize_answer(known))}(?!\w)" for known in question.answers]
    return float(any(re.search(pattern, text) for pattern in patterns))


def _regex(question: Question, answer: str) -> float:
    return float(any(matches(pattern, answer.strip()) for pattern in question.answers))


def _choice(question: Question, answer: str) -> float:
    letter = chosen_letter(answer, question.choices)
    return float(letter is not None and letter in map(_gold_letter(question), question.answers))


def _has_number(question: Question, answer: str) -> bool:
    return last_number(answer) is not None


def _has_letter(question: Question, answer: str) -> bool:
    return chosen_letter(answer, question.choices) is not None


def _gold_letter(question: Question) -> Callable[[str], str | None]:
    """Map an answer in the data to its letter: it may be a letter, a number from 0, or a choice's text."""

    def letter(text: str) -> str | None:
        count = len(question.choices) or len(LETTERS)
        if text.strip().isdecimal() and normalize_answer(text) not in map(normalize_answer, question.choices):
            return LETTERS[int(text)] if int(text) < count else None
        found = chosen_letter(text, question.choices)
        return found if found is not None and LETTERS.index(found) < count else None

    return letter


def _check_text(question: Question) -> None:
    if not all(normalize_answer(text) for text in question.answers):
        raise ValueError("the answer is empty")


def _check_number(question: Question) -> None:
    if any(last_number(text) is None for text in question.answers):
        raise ValueError(f"the answer {question.answers[0]!r} has no number")


def _check_pattern(question: Question) -> None:
    for pattern in question.answers:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"the answer {pattern!r} is not a regular expression ({error})") from None


def _check_letter(question: Question) -> None:
    for text in question.answers:
        if _gold_letter(question)(text) is None:
            expected = f"one of {len(question.choices)} choices" if question.choices else "a letter"
            raise ValueError(f"the answer {text!r} is not {expected}")


JUDGES: Mapping[str, Judge] = {
    "exact": Judge(_exact, _check_text, "Answer with the answer and nothing else."),
    "number": Judge(
        _number, _check_number, "Answer with a number; the last number of your answer counts.", _has_number
    ),
    "contains": Judge(_contains, _check_text, "Your answer must contain the right words."),
    "regex": Judge(_regex, _check_pattern, "Answer with the answer and nothing else."),
    "choice": Judge(_choice, _check_letter, "Answer with the letter of the right choice.", _has_letter),
}
"""Judges by name. ``exact``: the same text. ``number``: the last number is equal. ``contains``: an accepted
answer occurs as whole words. ``regex``: the whole answer matches the pattern in the data. ``choice``: the
letter of the right choice, or its text."""


def _function_judge(name: str) -> Judge:
    function = load_object(name, "judge")
    if not callable(function):
        raise UsageError(f"judge {name}: it is not a function; expected one that takes (row, answer).")

    def score(question: Question, answer: str) -> float:
        try:
            value = function(dict(question.row or {}), answer)
        except Exception as error:
            raise EnvError(f"The judge {name} raised {one_line(error)}.") from error
        if not isinstance(value, (bool, int, float)) or not 0 <= value <= 1:
            raise EnvError(f"The judge {name} returned {value!r}; expected a number from 0 to 1.")
        return float(value)

    return Judge(score, lambda question: None, "Answer the question.")
