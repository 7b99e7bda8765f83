"""Countdown: reach a target number from given numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, TextEnv, bare
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_range
from rollgym.envs.countdown.arithmetic import BadExpression, evaluate, random_expression
from rollgym.envs.countdown.puzzle import Puzzle, random_puzzle

_PARTIAL = 0.1

_INSTRUCTIONS = """\
Reach the target by arithmetic. Use the given numbers, each at most once, with + - * / and brackets.
Each turn, answer with one expression and nothing else.
Example: from the numbers 3, 7, 8, 25 the target 74 is reached by 25 * 3 - (8 - 7)
You have {attempts} attempt{s}. After a wrong one you are told its value or what is wrong with it.
You get a reward of 1 for reaching the target exactly{partial}, else 0."""
_PARTIAL_TEXT = ", 0.1 if your last attempt is a proper expression with another value"


class CountdownEnv(TextEnv):
    """Write an expression of the given numbers that has the target as its value.

    Observation: the numbers and the target; after a wrong attempt first its value or the error.

    Actions: an expression of the numbers, each used at most once, with ``+ - * /`` and brackets;
    ``= target`` may follow. Fractions and negative intermediate values are allowed.

    Reward: 1 for the target, else 0. With ``partial=True``, 0.1 if the last attempt is a proper expression.

    Success: an expression of the given numbers reached the target exactly.

    Ends: terminated when the target is reached or all attempts are used, improper ones included.

    Splits: random puzzles that can be solved, but not with one or two of the numbers; no set of numbers
    is in two splits.
    """

    pool_thread = "any"  # its calls are quick
    success_means = "an expression of the given numbers has exactly the target as its value"
    reward_range = (0.0, 1.0)
    tasks: TaskSet

    def __init__(
        self, *, count: int = 4, attempts: int = 3, partial: bool = False, render_mode: str | None = None
    ) -> None:
        """Give ``count`` numbers and this many attempts."""
        check_range("count", count, 3, 6)
        check_range("attempts", attempts, 1, 1_000)
        self._count, self._attempts, self._partial = count, attempts, partial
        self.instructions = _INSTRUCTIONS.format(
            attempts=attempts, s="s"[: attempts != 1], partial=_PARTIAL_TEXT if partial else ""
        )
        self.tasks = TaskSet(f"Countdown-{count}")
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Set the task's puzzle."""
        self._puzzle = self.tasks.draw(task, lambda rng: random_puzzle(rng, self._count), key=_numbers_key)
        self._left = self._attempts
        return self._question()

    def respond(self, action: str) -> StepResult:
        """Evaluate the expression and show its value."""
        self._left -= 1
        over = self._left == 0
        try:
            text, value = self._work_out(action)
        except BadExpression as error:
            note = f"Not a proper expression. {error}{self._ending()}"
            return StepResult(note, terminated=over, valid=False)
        if value == self._puzzle.target:
            return StepResult(f"Correct! {text} = {value}.", 1.0, terminated=True, success=True)
        reward = _PARTIAL if over and self._partial else 0.0
        return StepResult(
            f"{text} = {_number_text(value)}, not {self._puzzle.target}.{self._ending()}", reward, over
        )

    def facts(self) -> Mapping[str, Any]:
        """The numbers, the target and the attempts left."""
        return {"numbers": list(self._puzzle.numbers), "target": self._puzzle.target, "left": self._left}

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A random expression of two or more of the numbers."""
        return random_expression(info["numbers"], rng)

    def _work_out(self, action: str) -> tuple[str, Fraction]:
        text = bare(action)
        expression, equals, result = text.rpartition("=")
        if equals and result.strip() == str(self._puzzle.target):
            text = expression.rstrip()
        value, numbers = evaluate(text)
        for number, times in Counter(numbers).items():
            available = self._puzzle.numbers.count(number)
            if times > available:
                raise BadExpression(
                    f"{number} is used {times} times but given {available} times."
                    if available
                    else f"{number} is not one of the given numbers."
                )
        return text, value

    def _question(self) -> str:
        numbers = ", ".join(map(str, self._puzzle.numbers))
        return f"Numbers: {numbers}. Target: {self._puzzle.target}. Attempts left: {self._left}."

    def _ending(self) -> str:
        return f"\n{self._question()}" if self._left else " No attempts left."


def _numbers_key(puzzle: Puzzle) -> str:
    return " ".join(map(str, sorted(puzzle.numbers)))


def _number_text(value: Fraction) -> str:
    """A whole number, or a fraction with a rounded value beside it."""
    return str(value) if value.denominator == 1 else f"{value} (about {float(value):.2f})"
