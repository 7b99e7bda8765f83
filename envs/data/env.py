"""An environment whose tasks are rows of data files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, TextEnv, check_whole
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.data.judges import LETTERS, make_judge
from rollgym.envs.data.task_rows import Options, open_tasks, resolved

__all__ = ["DataEnv"]


class DataEnv(TextEnv):
    """Answer the question of a row; a judge compares the answer with the row's.

    Observation: the prompt of the row, with its choices if it has any; after a wrong answer, that it was
    wrong and how many attempts are left. A row with several prompts asks them one after another.

    Actions: an answer, as plain text.

    Reward: 1 for a right answer, else 0; with several prompts an equal part of 1 for each. A judge that is
    a function gives any reward from 0 to 1.

    Success: every prompt of the row was answered with the full reward.

    Ends: terminated when all prompts are answered or their attempts are used.

    Splits: those that the data name (files by split, or a column), or made by a hash of the prompt. No
    prompt is in two splits.

    Args:
        data: A file (JSONL, Parquet, Arrow), a pattern, a list of files, a folder that
            ``datasets.save_to_disk`` wrote, files by split (``{train: a.jsonl, test: b.jsonl}``), or a list
            of rows. Default: embedded sums of two numbers.
        columns: Columns of the data by name: ``prompt``, ``answer``, and optionally ``choices`` and
            ``split``. A dot leads to a field inside a column. A judge that is a function gets all of them.
        judge: ``exact``, ``number``, ``contains``, ``regex``, ``choice``, or ``module:function``.
        answer_pattern: A regular expression for the answer inside the column; its first group counts.
        attempts: Answers allowed for each prompt.
        splits: Shares of the splits to make, such as ``{train: 0.9, test: 0.1}``.
        split_seed: Another seed makes other splits.
        overlap: Prompts that are in two named splits: ``error``, or ``drop`` them from the earlier split.
        instructions: Replaces the instructions.
        reveal: Puts the accepted answer into ``info`` for the expert, which then also solves files.
    """

    pool_thread = "any"  # its calls are quick
    success_means = "every prompt of the task was answered right"
    reward_range = (0.0, 1.0)
    tasks: TaskSet

    def __init__(
        self,
        *,
        data: Any = None,
        columns: Mapping[str, str] | None = None,
        judge: str = "exact",
        answer_pattern: str | None = None,
        attempts: int = 1,
        splits: Mapping[str, float] | None = None,
        split_seed: int = 0,
        overlap: str = "error",
        instructions: str | None = None,
        reveal: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self._attempts = check_whole("attempts", attempts)
        if not isinstance(judge, str):
            raise UsageError(f"judge must be a name or module:function, not {judge!r}.")
        if data is None:
            judge = "number"
        self._reveal = bool(reveal)
        options = Options(
            data=resolved(data),
            columns=dict(columns or {}),
            splits=dict(splits or {}),
            split_seed=check_whole("split_seed", split_seed, 0),
            overlap=overlap,
            judge=judge,
            answer_pattern=answer_pattern,
        )
        self._rows = open_tasks(options)
        self._judge = make_judge(judge)
        self.tasks = self._rows.tasks
        self.instructions = self._instructions() if instructions is None else str(instructions)
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Ask the first prompt of the row."""
        self._questions = self._rows.questions(task.split, task.index)
        self._row_number = self._rows.row_number(task.split, task.index)
        self._current, self._left, self._right = 0, self._attempts, 0
        return self._questions[0].prompt

    def respond(self, action: str) -> StepResult:
        """Judge an answer; then ask again, ask the next prompt, or end."""
        question = self._questions[self._current]
        valid = self._judge.readable(question, action)
        score = self._judge.score(question, action) if valid else 0.0
        right = score >= 1.0
        self._left -= 1
        if not right and self._left:
            return StepResult(f"That is not right. Attempts left: {self._left}.", valid=valid)
        self._right += right
        reward = score / len(self._questions)
        self._current, self._left = self._current + 1, self._attempts
        verdict = "Right." if right else "That is not right."
        if self._current < len(self._questions):
            return StepResult(f"{verdict}\n{self._questions[self._current].prompt}", reward, valid=valid)
        success = self._right == len(self._questions)
        return StepResult(verdict, reward, terminated=True, success=success, valid=valid)

    def facts(self) -> Mapping[str, Any]:
        """The number of the row, attempts left, the letters of choices and, if revealed, the answer."""
        facts: dict[str, Any] = {"row": self._row_number, "left": self._left}
        question = self._questions[min(self._current, len(self._questions) - 1)]
        if question.choices:
            facts["actions"] = list(LETTERS[: len(question.choices)])
        if self._reveal:
            facts["solution"] = question.answers[0]
        return facts

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A random letter where there are choices, else a random number."""
        actions: Sequence[str] = info.get("actions") or ()
        return str(actions[int(rng.integers(len(actions)))]) if actions else str(int(rng.integers(20, 120)))

    def _instructions(self) -> str:
        lines = [self._judge.instruction]
        if self._attempts > 1:
            lines.append(f"You have {self._attempts} attempts.")
        lines.append("You get a reward of 1 for a right answer, else 0.")
        return "\n".join(lines)
