"""GuessTheNumber: find a hidden number from higher/lower answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, TextEnv, bare
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_choice, check_range

ANSWERS = ("last", "all", "range")
_NUMBER = re.compile(r"[+-]?[0-9]{1,12}")

_INSTRUCTIONS = """\
Find a hidden whole number from 1 to {highest}.
Each turn, answer with one whole number and nothing else. Example: {example}
You are told whether the hidden number is higher or lower than your guess.
You have {guesses} guesses. An answer that is not a number from 1 to {highest} uses up a guess too.
You get a reward of 1 for finding the number, else 0."""


class GuessTheNumberEnv(TextEnv):
    """Find a hidden number from 1 to ``highest`` with few guesses.

    Observation: one line; whether the hidden number is higher or lower than the guess (``answers="all"``:
    than each guess so far; ``answers="range"``: the numbers that the answers leave possible), and guesses
    left.

    Actions: a whole number in digits.

    Reward: 1 for the right number, else 0.

    Success: the number was found.

    Ends: terminated when the number is found or the guesses are used up.

    Splits: every task draws its number from the same few, so numbers recur in all splits.
    """

    pool_thread = "any"  # its calls are quick
    success_means = "the hidden number was guessed"
    reward_range = (0.0, 1.0)
    tasks: TaskSet

    def __init__(
        self,
        *,
        highest: int = 100,
        guesses: int = 10,
        answers: str = "last",
        render_mode: str | None = None,
    ) -> None:
        """Hide a number from 1 to ``highest``; allow so many guesses; show one answer, all, or a range."""
        check_range("highest", highest, 2, 1_000_000)
        check_range("guesses", guesses, 1, 1_000)
        check_choice("answers", answers, ANSWERS)
        self._highest, self._guesses = highest, guesses
        self._shown = answers
        self.instructions = _INSTRUCTIONS.format(
            highest=highest, guesses=guesses, example=max(1, highest // 3)
        )
        self.tasks = TaskSet(f"GuessTheNumber-{highest}")
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Hide the task's number."""
        self._hidden = int(task.rng().integers(1, self._highest + 1))
        self._left = self._guesses
        self._possible = (1, self._highest)
        self._answers: list[str] = []
        return f"Guess a number from 1 to {self._highest}. Guesses left: {self._left}."

    def respond(self, action: str) -> StepResult:
        """Answer a guess; an invalid action uses one up."""
        self._left -= 1
        text = bare(action)
        guess = int(text) if _NUMBER.fullmatch(text) else 0
        if not 1 <= guess <= self._highest:
            note = f"That is not a whole number from 1 to {self._highest}."
            if self._shown != "last" and self._answers:
                note = f"{note} {self._answer()}"
            return StepResult(self._with_ending(note), terminated=self._left == 0, valid=False)
        if guess == self._hidden:
            self._possible = (guess, guess)
            return StepResult(f"Correct! The number is {guess}.", 1.0, terminated=True, success=True)
        self._answers.append(f"{'higher' if self._hidden > guess else 'lower'} than {guess}")
        self._narrow(guess)
        return StepResult(self._with_ending(self._answer()), terminated=self._left == 0)

    def facts(self) -> Mapping[str, Any]:
        """The least and greatest number the answers leave possible, and guesses left."""
        return {"possible": list(self._possible), "left": self._left}

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Any number of the whole range, ignoring earlier answers."""
        return str(int(rng.integers(1, self._highest + 1)))

    def _answer(self) -> str:
        if self._shown == "range":
            low, high = self._possible
            return f"The number is from {low} to {high}."
        return f"The number is {', '.join(self._answers if self._shown == 'all' else self._answers[-1:])}."

    def _with_ending(self, note: str) -> str:
        if self._left:
            return f"{note} Guesses left: {self._left}."
        return f"{note} No guesses left: the number was {self._hidden}."

    def _narrow(self, guess: int) -> None:
        low, high = self._possible
        if self._hidden > guess:
            self._possible = (max(low, guess + 1), high)
        else:
            self._possible = (low, min(high, guess - 1))
