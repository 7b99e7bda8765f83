"""Task sets: named splits of numbered tasks that are identical in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.seeding import derive_rng, stable_digest

T = TypeVar("T")

DEFAULT_SPLITS: Mapping[str, int] = {"train": 100_000, "dev": 1_000, "test": 1_000}


@dataclass(frozen=True, slots=True)
class Task:
    """One task: its split and index, and a generator for its content.

    Example:
        >>> task = TaskSet("maze-1").task("test", 7)
        >>> size = int(task.rng().integers(5, 10))
    """

    set_name: str
    split: str
    index: int

    def rng(self) -> np.random.Generator:
        """A fresh generator for this task's content: every call returns the same stream."""
        return derive_rng("task", self.set_name, self.split, self.index)


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Named splits with a size each. ``name`` must change whenever the content does.

    The content of a task depends only on the name of the set, the split and the index. The *seed* of an
    episode determines all other randomness in it.

    Example:
        >>> TaskSet("maze-1", {"train": 10_000, "test": 500}).size("test")
        500
    """

    name: str
    splits: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_SPLITS))

    def __post_init__(self) -> None:
        if not self.splits or any(size < 1 for size in self.splits.values()):
            raise ValueError(f"a task set needs at least one split of size >= 1: {self.splits}")

    def size(self, split: str) -> int:
        """The number of tasks in a split."""
        if split not in self.splits:
            raise UnknownName("split", split, self.splits, f"Splits: {', '.join(self.splits)}.")
        return self.splits[split]

    def task(self, split: str, index: int) -> Task:
        """Task ``index`` of the split."""
        size = self.size(split)
        if not 0 <= index < size:
            raise UsageError(f"Task {index} is out of range: split {split!r} has tasks 0 to {size - 1}.")
        return Task(self.name, split, index)

    def order(self, split: str, seed: int) -> Iterator[int]:
        """An endless stream of indices: the whole split in a seeded order, then in another, and so on."""
        size = self.size(split)
        epoch = 0
        while True:
            yield from map(int, derive_rng("order", split, seed, epoch).permutation(size))
            epoch += 1

    def fingerprint(self, split: str) -> str:
        """A hash that differs whenever the split may differ (`home` depends on all splits)."""
        return stable_digest("task set", self.name, split, self.size(split), *self.splits).hex()[:16]

    def home(self, key: str) -> str:
        """The split that content with this key belongs to (a tenth for each split but the first)."""
        first, *others = self.splits
        bucket = int.from_bytes(stable_digest("home", key)[:8], "big") % 10
        return others[bucket] if bucket < min(len(others), 9) else first

    def draw(self, task: Task, make: Callable[[np.random.Generator], T], key: Callable[[T], str]) -> T:
        """Make content for a task such that no two splits share any.

        ``make`` is called with the task's generator until the key of the content falls into the task's
        split; content is assigned to splits by a hash of its key.
        """
        rng = task.rng()
        for _ in range(10_000):
            content = make(rng)
            if self.home(key(content)) == task.split:
                return content
        raise RuntimeError(f"{self.name}: no content for split {task.split!r} in 10,000 draws")
