"""The Mastermind environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, TextEnv, bare
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_range
from rollgym.envs.mastermind.codes import SYMBOLS, code_at, code_index, count_codes, pegs, shuffled_numbers

_GUESS = re.compile(r"(?:guess[\s:]+)?((?:[0-9][\s,]*)+)", re.IGNORECASE)
_FEWEST, _MOST = 10, 1_000_000

_INSTRUCTIONS = """\
Break a secret code of {length} digits. Each digit is one of 1 to {digits}; {repeats}.
Answer with one guess of {length} digits, for example `{example}`.
After each guess you are told how close it is:
- black: how many digits are right and in the right place;
- white: how many further digits of the guess are in the code, but in another place.
You have {guesses} guesses; an answer that is not a guess uses one up too.
The reward is 1 for finding the code, otherwise 0."""


class MastermindEnv(TextEnv):
    """Find a secret code of digits from black and white pegs.

    Observation:
        All guesses so far, one on a line with its pegs (``1122: 1 black, 0 white``), and the number of
        guesses left.
    Actions:
        A code, ``1234``; ``1 2 3 4``, ``1,2,3,4`` and ``guess 1234`` mean the same. A guess may repeat
        digits even where the code may not. Anything else is invalid and uses up a guess.
    Reward:
        1 for the right code, otherwise 0.
    Success:
        The code was guessed.
    Ends:
        Terminated when the code is guessed (won) or no guess is left (lost). Never truncated.
    Splits:
        All codes are put into a fixed shuffled order; a tenth of them belongs to ``dev``, a tenth to
        ``test``, the rest to ``train``. Tasks 0, 1, 2... of a split hide different codes until all of its
        codes are used, then the same again (4 digits out of 6: 1,038, 129 and 129 codes).
    """

    pool_thread = "any"  # its calls are quick
    success_means = "the code was guessed"
    reward_range = (0.0, 1.0)

    def __init__(
        self,
        *,
        length: int = 4,
        digits: int = 6,
        duplicates: bool = True,
        guesses: int = 10,
        render_mode: str | None = None,
    ) -> None:
        _check_arguments(length, digits, duplicates, guesses)
        self._length, self._digits, self._duplicates, self._guesses = length, digits, duplicates, guesses
        self._count = count_codes(length, digits, duplicates)
        self.tasks = TaskSet(f"Mastermind-{length}-{digits}{'' if duplicates else '-distinct'}")
        self.instructions = _INSTRUCTIONS.format(
            length=length,
            digits=digits,
            guesses=guesses,
            repeats="a digit may occur more than once" if duplicates else "no digit occurs twice",
            example=code_at(digits - 1, length, digits, duplicates),
        )
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Choose the task's code."""
        index = code_index(task, self._count)
        number = int(shuffled_numbers(task.set_name, self._count)[index])
        self._code = code_at(number, self._length, self._digits, self._duplicates)
        self._history: list[tuple[str, int, int]] = []
        self._left = self._guesses
        return self._table(f"No guesses yet. {self._guesses_left()}")

    def respond(self, action: str) -> StepResult:
        """Play one guess."""
        self._left -= 1
        guess = self._parse(action)
        if guess is not None:
            self._history.append((guess, *pegs(self._code, guess)))
        if guess == self._code:
            observation = self._table(f"You found the code: {self._code}.")
            return StepResult(observation, 1.0, terminated=True, success=True)
        note = "" if guess else f"Not a guess: answer {self._length} digits from 1 to {self._digits}. "
        ending = self._guesses_left() if self._left else f"No guesses left. The code was {self._code}."
        return StepResult(self._table(note + ending), terminated=self._left == 0, valid=guess is not None)

    def facts(self) -> Mapping[str, Any]:
        """The rules in numbers, the guesses so far with their pegs, and how many are left."""
        return {
            "length": self._length,
            "digits": self._digits,
            "duplicates": self._duplicates,
            "history": self._history,
            "guesses_left": self._left,
        }

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Any code that could be the secret one."""
        number = int(rng.integers(self._count))
        return code_at(number, self._length, self._digits, self._duplicates)

    def _parse(self, action: str) -> str | None:
        match = _GUESS.fullmatch(bare(action))
        guess = re.sub(r"[\s,]", "", match[1]) if match else ""
        is_valid = set(guess) <= set(SYMBOLS[: self._digits])
        return guess if len(guess) == self._length and is_valid else None

    def _table(self, last_line: str) -> str:
        lines = [f"{guess}: {black} black, {white} white" for guess, black, white in self._history]
        return "\n".join([*lines, last_line])

    def _guesses_left(self) -> str:
        return f"{self._left} guess{'' if self._left == 1 else 'es'} left."


def _check_arguments(length: int, digits: int, duplicates: bool, guesses: int) -> None:
    check_range("length", length, 1)
    check_range("digits", digits, 2, len(SYMBOLS))
    check_range("guesses", guesses, 1)
    count = count_codes(length, digits, duplicates)
    if not _FEWEST <= count <= _MOST:
        raise UsageError(
            f"{length} digits out of {digits} make {count} codes; choose length and digits so that there "
            f"are {_FEWEST} to {_MOST:,}."
        )
