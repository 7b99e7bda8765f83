"""Mathematics: a problem, an answer, and a judge that compares it with the expected one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, TextEnv
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.answers import read_answer
from rollgym.envs.arguments import check_choice, check_kinds, check_range
from rollgym.envs.math.files import load_problems
from rollgym.envs.math.judge import JUDGES, Judge, read_number
from rollgym.envs.math.problems import KINDS, LEVELS, Problem, random_problem
from rollgym.envs.math.working import LEVEL as WORKING_LEVEL
from rollgym.envs.task_files import FileTasks

_INSTRUCTIONS = r"""Solve the problem. You may think first.
End with a line of the form
Answer: X
where X is the answer alone, such as 42, -7 or 3/4. \boxed{{X}} or X alone on the last line works, too.
Give the answer once: a reply with several answers has none.
{working}You have {attempts} attempt{s}. The reward is 1 for the right answer, else 0."""
_SHOW_WORKING = "Write the steps of your working in a line before the answer.\n"


class MathEnv(TextEnv):
    r"""Answer a mathematics problem.

    Observation: the problem; after a wrong attempt, first that it was wrong.

    Actions: any text with one answer: ``\boxed{X}``, a line ``Answer: X``, or a number alone on the last
    line. A text without an answer, or with several, gives ``valid=False``; it uses up an
    attempt.

    Reward: 1 for the right answer, else 0.

    Success: the same.

    Ends: terminated by the right answer or when the attempts are used up.

    Splits: problems made by number, whose kind and numbers are in no two splits; a file has its own splits.
    """

    reward_range = (0.0, 1.0)
    success_means = "the answer equals the expected one"
    pool_thread = "any"  # its calls are quick
    tasks: TaskSet

    def __init__(
        self,
        problems: str | Mapping[str, str] = "generated",
        *,
        level: int | None = None,
        kinds: Sequence[str] | None = None,
        attempts: int = 1,
        judge: str = "auto",
        working: bool = False,
        render_mode: str | None = None,
    ) -> None:
        """Problems are ``generated``, of one ``level`` (1 to 5) or all, or from a file or files by split.

        ``kinds`` restricts generated problems to these, such as ``["addition", "subtraction"]``.

        With ``working``, the instructions ask for written working, and the expert writes it; only the answer
        is judged.
        """
        check_range("attempts", attempts, 1, 1_000)
        check_choice("judge", judge, JUDGES)
        if level is not None and level not in LEVELS:
            raise UsageError(f"level must be from 1 to 5, or null for all levels, not {level!r}.")
        if working and level != WORKING_LEVEL:
            raise UsageError(f"working requires level={WORKING_LEVEL}, whose problems have written working.")
        self._level, self._attempts, self._working = level, attempts, working
        self._judge = Judge(judge)
        self._file: FileTasks[Problem] | None = None
        known = [kind.name for kind in KINDS.values() if level in (None, kind.level)]
        self._kinds = check_kinds(kinds, known, level)
        named = "" if kinds is None else f"-{'-'.join(sorted(self._kinds))}"
        self.tasks = TaskSet(f"Math-{level or 'all'}{named}")
        if problems != "generated":
            if level is not None or kinds is not None:
                raise UsageError(
                    "level and kinds apply to generated problems only: remove them, or filter the file."
                )
            self._file = load_problems(problems)
            self.tasks = self._file.tasks
            used = {self._judge.used_for(p.answer) for own in self._file.contents.values() for p in own}
            if "math_verify" in used:
                self.pool_thread = "own"  # it waits for another process
        self.instructions = _INSTRUCTIONS.format(
            working=_SHOW_WORKING if working else "", attempts=attempts, s="s"[: attempts != 1]
        )
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Set the task's problem."""
        self._problem = self._pose(task)
        self._left = self._attempts
        return self._problem.text

    def respond(self, action: str) -> StepResult:
        """Read and judge the answer."""
        self._left -= 1
        over = self._left == 0
        answer = read_answer(action, lambda line: read_number(line) is not None)
        info = {"answer": answer.text, "answer_found": answer.found, "judge": self._used}
        if not answer.given:
            why = "There are several answers." if answer.found == "several" else "There is no answer."
            return StepResult(self._again(why), terminated=over, valid=False, info=info)
        if self._judge.right(answer.text, self._problem.answer):
            return StepResult("Correct.", 1.0, terminated=True, success=True, info=info)
        return StepResult(self._again("Wrong."), terminated=over, info=info)

    def facts(self) -> Mapping[str, Any]:
        """Level, kind and numbers of a generated problem, whether working is asked for, and attempts left."""
        problem = self._problem
        facts: dict[str, Any] = {"attempts_left": self._left}
        if problem.level is not None:
            facts["level"] = problem.level
        if problem.values is not None:
            facts |= {"kind": problem.kind, "values": dict(problem.values)}
        if self._working:
            facts["working"] = True
        return facts

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A random whole number."""
        return f"Answer: {int(rng.integers(-100, 1_000))}"

    def close(self) -> None:
        """Close the judge."""
        self._judge.close()

    @property
    def _used(self) -> str:
        return self._judge.used_for(self._problem.answer)

    def _pose(self, task: Task) -> Problem:
        if self._file is not None:
            return self._file.content(task)
        return self.tasks.draw(
            task, lambda rng: random_problem(rng, self._level, self._kinds), lambda problem: problem.key
        )

    def _again(self, note: str) -> str:
        return f"{note}\n{self._problem.text}" if self._left else note
