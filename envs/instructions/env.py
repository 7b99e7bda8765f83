"""Instructions: write a text that satisfies constraints, each checked by a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollgym.core.env import StepResult, TextEnv
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_choice, check_range
from rollgym.envs.instructions.files import load_instructions
from rollgym.envs.instructions.generate import (
    ENDINGS,
    FILLERS,
    KEYS,
    LEVELS,
    NOUNS,
    Instruction,
    fault_of,
    random_instruction,
    share,
)
from rollgym.envs.instructions.rules import words
from rollgym.envs.task_files import FileTasks

REWARDS = ("all", "fraction")
_INSTRUCTIONS = """\
Write what is asked. Your whole reply is the text that is checked, so write nothing else around it.
A program checks each point. A reply that repeats the task, or one word over and over, is not a text.
You have {attempts} attempt{s}. The reward is {reward}."""


class InstructionsEnv(TextEnv):
    """Write a text under constraints.

    Observation: the task, with one line for each constraint; after an attempt that fails, first which points
    do not hold.

    Actions: the text. A text without a word, and for generated tasks one that repeats the task or a single
    word, gives ``valid=False``; it uses up an attempt.

    Reward: 1 if all constraints hold, else 0; with ``reward="fraction"``, the share that holds in the last
    attempt.

    Success: all constraints hold.

    Ends: terminated when all constraints hold or the attempts are used up.

    Splits: tasks made by number, whose constraints are in no two splits together; a file has its own splits.
    """

    reward_range = (0.0, 1.0)
    success_means = "all constraints hold"
    pool_thread = "any"  # its calls are quick
    tasks: TaskSet

    def __init__(
        self,
        instructions: str | Mapping[str, str] = "generated",
        *,
        level: int | None = None,
        attempts: int = 1,
        reward: str = "all",
        render_mode: str | None = None,
    ) -> None:
        """Tasks are ``generated``, of one ``level`` (1 to 4) or all, or from a file or files by split."""
        check_range("attempts", attempts, 1, 1_000)
        check_choice("reward", reward, REWARDS)
        if level is not None and level not in LEVELS:
            raise UsageError(f"level must be from 1 to 4, or null for all levels, not {level!r}.")
        self._level, self._attempts, self._fraction = level, attempts, reward == "fraction"
        self._file: FileTasks[Instruction] | None = None
        self.tasks = TaskSet(f"Instructions-{level or 'all'}")
        if instructions != "generated":
            if level is not None:
                raise UsageError("level applies to generated tasks only: remove it.")
            self._file = load_instructions(instructions)
            self.tasks = self._file.tasks
        self.instructions = _INSTRUCTIONS.format(
            attempts=attempts,
            s="s"[: attempts != 1],
            reward="the share of the points that hold" if self._fraction else "1 if all points hold, else 0",
        )
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Set the task."""
        self._task = self._pose(task)
        self._left = self._attempts
        return self._task.prompt

    def respond(self, action: str) -> StepResult:
        """Check every constraint."""
        self._left -= 1
        over = self._left == 0
        fault = self._fault(action)
        constraints = self._task.constraints
        held = [not fault and constraint.holds(action) for constraint in constraints]
        info = {
            "constraints": [
                {**constraint.to_json(), "holds": holds}
                for constraint, holds in zip(constraints, held, strict=True)
            ],
            "held": sum(held),
        }
        if fault:
            return StepResult(self._again(fault), terminated=over, valid=False, info=info)
        if all(held):
            return StepResult("All points hold.", 1.0, terminated=True, success=True, info=info)
        missed = [c.sentence for c, holds in zip(constraints, held, strict=True) if not holds]
        reward = share(constraints, held) if over and self._fraction else 0.0
        note = "\n".join(["These points do not hold:", *(f"- {sentence}" for sentence in missed)])
        return StepResult(self._again(note), reward, terminated=over, info=info)

    def facts(self) -> Mapping[str, Any]:
        """The constraints, the level of a generated task, and the attempts left."""
        facts: dict[str, Any] = {
            "constraints": [constraint.to_json() for constraint in self._task.constraints],
            "attempts_left": self._left,
        }
        return facts if self._task.level is None else {**facts, "level": self._task.level}

    @property
    def words(self) -> tuple[str, ...]:
        """Words of generated tasks and of the expert's texts."""
        return () if self._file is not None else (*NOUNS, *FILLERS, *KEYS, *ENDINGS)

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """A few random words."""
        picked = rng.choice(len(FILLERS), size=int(rng.integers(2, 21)), replace=False)
        return " ".join(FILLERS[int(number)] for number in picked)

    def _pose(self, task: Task) -> Instruction:
        if self._file is not None:
            return self._file.content(task)
        return self.tasks.draw(task, lambda rng: random_instruction(rng, self._level), lambda made: made.key)

    def _fault(self, text: str) -> str:
        """Return the reason why a reply earns nothing, or an empty string; not for tasks of files."""
        if not words(text):
            return "There is no text."
        return "" if self._file is not None else fault_of(text, self._task.prompt)

    def _again(self, note: str) -> str:
        return f"{note}\n{self._task.prompt}" if self._left else note
