"""Programming with given lines: choose some and put them in order. Small enough for a tiny policy."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollgym.core.env import StepResult, TextEnv, bare, check_whole
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_choice
from rollgym.envs.code.families.base import Rng, compiled, numbers
from rollgym.envs.code.families.steps import STEPS
from rollgym.envs.code.harness import encode
from rollgym.envs.code.judge import Result, judge
from rollgym.envs.code.problems import SPLITS
from rollgym.envs.code.sandbox_handle import SandboxHandle
from rollgym.envs.code.types import Case, Cases

POOL: Mapping[str, tuple[str, int, str]] = {
    "double": ("times", 2, "twofold"),
    "triple": ("times", 3, "threefold"),
    "add one": ("add", 1, "next"),
    "add ten": ("add", 10, "further"),
    "negate": ("negate", 0, "minus"),
    "square": ("square", 0, "power"),
    "keep even": ("even", 0, "evens"),
    "keep odd": ("odd", 0, "odds"),
    "drop first": ("drop", 1, "tail"),
    "reverse": ("reverse", 0, "backwards"),
    "sort": ("sort", 0, "ordered"),
    "running sum": ("running", 0, "totals"),
    "write twice": ("twice", 0, "pairs"),
    "add index": ("index", 0, "numbered"),
}
"""Goals by their words: step, its number and the name of its line."""
CODE: Mapping[str, str] = {words: STEPS[step].code_for(n) for words, (step, n, _) in POOL.items()}
NAMES: Mapping[str, str] = {CODE[words]: name for words, (_, _, name) in POOL.items()}
VIEWS = ("lines", "names")
TESTS = 6

_INSTRUCTIONS = """\
Make a program out of given lines. The goal says what it must do to a list of numbers xs, in order.
Answer with the {called} of {wanted} lines in the order in which they must run, for example: {example}
You have {attempts} attempt{s}. The program is run on hidden tests: the reward is 1 if it passes all, \
else 0."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Goal and available lines."""

    goal: tuple[str, ...]
    lines: tuple[str, ...]


class SnippetsEnv(TextEnv):
    """Choose lines of code and their order, so that the program reaches the goal.

    Observation: the goal and the numbered lines (or their names); after a wrong attempt, first how many tests
    it passed.

    Actions: the numbers (or names) of as many lines as the goal has steps, in order: ``3 1``.
    ``info["actions"]`` lists them. Anything else gives ``valid=False``; it uses up an attempt.

    Reward: 1 if the program, which is really run in a sandbox, passes all hidden tests; else 0.

    Success: the same.

    Ends: terminated when the tests pass or the attempts are used up.

    Splits: no goal is in two splits.
    """

    reward_range = (0.0, 1.0)
    success_means = "the chosen lines, in the chosen order, pass all hidden tests"
    tasks: TaskSet

    def __init__(
        self,
        *,
        steps: int = 2,
        lines: int = 5,
        attempts: int = 1,
        view: str = "lines",
        sandbox: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Set the steps of a goal and the number of lines, which are shown or only named (``view``)."""
        check_whole("attempts", attempts)
        if steps not in (2, 3):
            raise UsageError(f"steps must be 2 or 3, not {steps!r}.")
        if lines not in range(4, 9):
            raise UsageError(f"lines must be from 4 to 8, not {lines!r}.")
        check_choice("view", view, VIEWS)
        self._steps, self._lines, self._attempts, self._named = steps, lines, attempts, view == "names"
        self._box = SandboxHandle(sandbox)
        self.tasks = TaskSet(f"CodeSnippets-{steps}-{lines}", SPLITS)
        example = list(NAMES.values()) if self._named else list("21345678")
        self.instructions = _INSTRUCTIONS.format(
            called=view if self._named else "numbers",
            wanted=steps,
            example=" ".join(example[:steps]),
            attempts=attempts,
            s="s"[: attempts != 1],
        )
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Set the task's goal and lines."""
        self._puzzle = self.tasks.draw(task, self._random_puzzle, lambda puzzle: ", ".join(puzzle.goal))
        self._tests = _tests(task.rng(), [CODE[words] for words in self._puzzle.goal])
        self._left = self._attempts
        self._box.fresh()
        return self._question()

    def respond(self, action: str) -> StepResult:
        """Put the lines together, run them on the tests."""
        self._left -= 1
        over = self._left == 0
        lines = dict(zip(self._called(), self._puzzle.lines, strict=True))
        names = re.split(r"[\s,;]+", bare(action).lower())
        if len(names) != self._steps or len(set(names)) < len(names) or not lines.keys() >= set(names):
            hint = "of the names" if self._named else f"numbers from 1 to {self._lines}"
            note = f"Answer with {self._steps} different {hint}."
            return StepResult(self._again(note), terminated=over, valid=False)
        results = self._results(_program([lines[name] for name in names]))
        passed = sum(result.passed for result in results)
        if passed == len(results):
            return StepResult("all tests passed", 1.0, terminated=True, success=True)
        return StepResult(self._again(f"{passed} of {len(results)} tests passed"), terminated=over)

    def facts(self) -> Mapping[str, Any]:
        """Goal, lines, sandbox level and all possible answers."""
        return {
            "goal": list(self._puzzle.goal),
            "lines": self._called() if self._named else list(self._puzzle.lines),
            "attempts_left": self._left,
            "sandbox": self._box.facts(),
            "actions": [" ".join(names) for names in itertools.permutations(self._called(), self._steps)],
        }

    @property
    def words(self) -> tuple[str, ...]:
        """All goals and lines that tasks use."""
        return (*CODE, *(NAMES.values() if self._named else CODE.values()))

    def close(self) -> None:
        """Close the sandbox."""
        self._box.close()

    def _called(self) -> list[str]:
        """Names of the lines in an answer."""
        if self._named:
            return [NAMES[line] for line in self._puzzle.lines]
        return [str(number) for number in range(1, self._lines + 1)]

    def _question(self) -> str:
        lines = [f"{number} {line}" for number, line in enumerate(self._puzzle.lines, 1)]
        choices = [f"lines: {' '.join(self._called())}"] if self._named else lines
        return "\n".join([f"goal: {', '.join(self._puzzle.goal)}", *choices])

    def _again(self, note: str) -> str:
        return f"{note}\n{self._question()}" if self._left else note

    def _random_puzzle(self, rng: Rng) -> Puzzle:
        goals = list(POOL)
        chosen_goals = [goals[int(k)] for k in rng.choice(len(goals), size=self._lines, replace=False)]
        order = rng.permutation(self._lines)
        return Puzzle(tuple(chosen_goals[: self._steps]), tuple(CODE[chosen_goals[int(k)]] for k in order))

    def _results(self, program: str) -> list[Result]:
        box = self._box
        results = box.once(
            lambda sandbox: judge(sandbox, program, "change", self._tests, box.settings.limits, box.seconds())
        )
        return results or [Result(False)] * len(self._tests)


def _program(lines: list[str]) -> str:
    return "\n    ".join(["def change(xs):", *lines, "return xs"]) + "\n"


def _tests(rng: Rng, lines: list[str]) -> Cases:
    function = compiled(_program(lines), "change")
    inputs = [numbers(rng, -20, 40, 5, 9) for _ in range(TESTS)]
    cases = [Case(arguments=[encode(xs)], expected=encode(function(list(xs)))) for xs in inputs]
    return Cases(cases=tuple(cases))
