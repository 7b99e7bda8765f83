"""Judge: write a text; a judge scores it by a rubric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, TextEnv
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_range
from rollgym.envs.instructions.generate import FILLERS, NOUNS, fault_of, random_instruction, share
from rollgym.envs.instructions.rules import Constraint, words
from rollgym.envs.judge.files import RubricTask, load_rubric_tasks
from rollgym.envs.judge.model import ModelJudge, Verdict
from rollgym.envs.task_files import FileTasks

LEVEL = 2
"""Level of the generated tasks of `rollgym.envs.instructions`."""
_INSTRUCTIONS = """\
Do the task. Your whole reply is the text that is judged by a rubric, point by point.
The reward is the score, from 0 to 1."""


class JudgeEnv(TextEnv):
    """Write a text that a judge scores by a rubric.

    Observation: the task and its rubric.

    Actions: the text; one without a word gives ``valid=False`` and scores 0 without the judge.

    Reward: the score, from 0 to 1. The default judge of generated tasks is a program that checks each point;
    a model judges where ``judge`` has its endpoint. Where the model fails or gives no valid verdict, the
    episode fails; it is never a reward of 0.

    Success: the score is at least ``pass_score``.

    Ends: terminated by the first reply.

    Splits: tasks made by number, whose rubrics are in no two splits; a file has its own splits.
    """

    reward_range = (0.0, 1.0)
    success_means = "the judge's score is at least pass_score"
    tasks: TaskSet

    def __init__(
        self,
        tasks: str | Mapping[str, str] = "generated",
        *,
        judge: str | Mapping[str, Any] = "checklist",
        pass_score: float = 0.8,
        render_mode: str | None = None,
    ) -> None:
        """Tasks are ``generated`` or from a file; ``judge`` is ``checklist`` or the settings of a model."""
        check_range("pass_score", pass_score, 0, 1)
        self._pass = pass_score
        self._file: FileTasks[RubricTask] | None = None
        self.tasks = TaskSet("Judge")
        if tasks != "generated":
            self._file = load_rubric_tasks(tasks)
            self.tasks = self._file.tasks
        self._model = _model(judge)
        if self._model is None and self._file is not None:
            raise UsageError(
                "Tasks from a file need a model as their judge: set judge to its base_url and model."
            )
        self.instructions = _INSTRUCTIONS
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Set the task."""
        self._constraints: tuple[Constraint, ...] = ()
        if self._file is not None:
            self._task = self._file.content(task)
        else:
            made = self.tasks.draw(task, lambda rng: random_instruction(rng, LEVEL), lambda one: one.key)
            self._constraints = made.constraints
            self._task = RubricTask("Write a text.", tuple(c.sentence for c in made.constraints))
        return "\n".join([self._task.prompt, "Rubric:", *(f"- {line}" for line in self._task.rubric)])

    def respond(self, action: str) -> StepResult:
        """Have the text judged."""
        if not words(action):
            return StepResult("There is no text.", terminated=True, valid=False, info={"judge": "none"})
        verdict = self._judged(action)
        info = {"judge": "checklist" if self._model is None else "model", "note": verdict.note}
        success = verdict.score >= self._pass
        note = f"Score: {verdict.score:.2f}"
        return StepResult(note, verdict.score, terminated=True, success=success, info=info)

    def facts(self) -> Mapping[str, Any]:
        """The rubric, and the constraints of a generated task."""
        facts: dict[str, Any] = {"rubric": list(self._task.rubric)}
        if self._constraints:
            facts["constraints"] = [constraint.to_json() for constraint in self._constraints]
        return facts

    @property
    def words(self) -> Sequence[str]:
        """Words of generated tasks."""
        return () if self._file is not None else (*NOUNS, *FILLERS)

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A few random words."""
        picked = rng.choice(len(FILLERS), size=int(rng.integers(2, 21)), replace=False)
        return " ".join(FILLERS[int(number)] for number in picked)

    def _judged(self, text: str) -> Verdict:
        if self._model is not None:
            return self._model.judge(self._task.prompt, self._task.rubric, text)
        return checklist(self._constraints, text)


def checklist(constraints: Sequence[Constraint], text: str) -> Verdict:
    """The share of the points that hold; 0 without the wanted words, or for the rubric or a word repeated."""
    fault = fault_of(text, " ".join(constraint.sentence for constraint in constraints))
    if fault:
        return Verdict(0.0, fault)
    held = [constraint.holds(text) for constraint in constraints]
    missed = [c.sentence for c, holds in zip(constraints, held, strict=True) if not holds]
    return Verdict(share(constraints, held), " ".join(missed))


def _model(judge: str | Mapping[str, Any]) -> ModelJudge | None:
    if judge == "checklist":
        return None
    if isinstance(judge, str):
        raise UsageError(f"judge must be checklist or the settings of a model, not {judge!r}.")
    known = ("base_url", "model", "api_key_env", "timeout", "retries", "max_tokens")
    unknown = sorted(set(judge) - set(known))
    if unknown or not {"base_url", "model"} <= set(judge):
        raise UsageError(
            f"judge needs base_url and model, and may have {', '.join(known[2:])}; "
            + (f"{unknown[0]!r} is unknown." if unknown else "one of the two is missing.")
        )
    return ModelJudge(**judge)
