"""Where problems come from: made by number, or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rollgym.envs.code.generate import build, choose_families, content_key, random_problem
from rollgym.envs.code.types import Problem
from rollgym.seeding import derive_rng, stable_digest
from rollgym.tasks import Task, TaskSet

SPLITS = {"train": 20_000, "dev": 500, "test": 500}


class Problems(Protocol):
    """Numbered problems in splits."""

    @property
    def tasks(self) -> TaskSet:
        """The splits."""

    def problem(self, task: Task) -> Problem:
        """The problem of a task."""


class Generated:
    """Problems of our own, made from the task's number; no two splits share one."""

    def __init__(self, difficulty: int | None = None, family: str | None = None) -> None:
        self._families = choose_families(difficulty, family)
        self.tasks = TaskSet(f"Code-{difficulty or 'all'}-{family or 'all'}", SPLITS)

    def problem(self, task: Task) -> Problem:
        """A family and its parameters from the task's generator, its tests from one of their own."""
        content = self.tasks.draw(task, lambda rng: random_problem(rng, self._families), content_key)
        return build(content, derive_rng("tests", task.split, task.index, content_key(content)))


class Listed:
    """Problems that were read from somewhere."""

    def __init__(self, name: str, problems: Mapping[str, Sequence[Problem]]) -> None:
        self._problems = {split: tuple(found) for split, found in problems.items() if found}
        content = stable_digest(*(repr(one) for found in self._problems.values() for one in found))
        sizes = {split: len(found) for split, found in self._problems.items()}
        self.tasks = TaskSet(f"Code-{name}-{content.hex()[:12]}", sizes)

    def problem(self, task: Task) -> Problem:
        """The problem at the task's place."""
        return self._problems[task.split][task.index]
