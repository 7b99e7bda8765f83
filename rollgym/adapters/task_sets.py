"""Task sets for libraries that have none: seeded, named by a hash of all that determines them, disjoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from rollgym.core.errors import UsageError
from rollgym.core.seeding import stable_digest
from rollgym.core.serialization import jsonable
from rollgym.core.tasks import DEFAULT_SPLITS, Task, TaskSet

T = TypeVar("T")


def make_task_set(
    env_id: str, version: str, options: Mapping[str, Any], splits: Mapping[str, int] | None = None
) -> TaskSet:
    """Return a task set whose name changes with the library's version and the options.

    Example:
        >>> make_task_set("reasoning_gym:leg_counting", "0.1.25", {"max_animals": 5}).name
        'reasoning_gym:leg_counting 0.1.25 1f0c...'
    """
    sizes = DEFAULT_SPLITS if splits is None else splits
    good = isinstance(sizes, Mapping) and sizes and all(type(size) is int for size in sizes.values())
    if not good or min(sizes.values()) < 1:
        raise UsageError(
            "splits must map names to numbers of tasks, such as {'train': 1000, 'test': 100}, not "
            f"{splits!r}."
        )
    try:
        text = json.dumps(jsonable(options), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{env_id}: an option cannot be recorded as JSON: {error}.") from error
    return TaskSet(f"{env_id} {version} {stable_digest(text).hex()[:12]}", dict(sizes))


def draw(tasks: TaskSet, task: Task, make: Callable[[np.random.Generator], T], key: Callable[[T], str]) -> T:
    """Draw content as `TaskSet.draw` does; too little content for the splits is a `UsageError`."""
    try:
        return tasks.draw(task, make, key)
    except RuntimeError:
        raise UsageError(
            f"{tasks.name} has too few different tasks to fill split {task.split!r} without sharing any with "
            "the others: pass the option splits with one split, such as {'train': 100}, or options with "
            "which the tasks vary more."
        ) from None
