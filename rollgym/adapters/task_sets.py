"""Task sets for libraries that have none: seeded, named by a hash of all that determines them, disjoint."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from rollgym.adapters.spaces import without_addresses
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


def content_key(value: Any) -> str:
    """A hash of a library's state, the same in every process: two tasks with the same key are one task."""
    return stable_digest(json.dumps(_plain(value), sort_keys=True)).hex()


def _plain(value: Any, depth: int = 0) -> Any:
    """A state as JSON, the same in every process; deep or cyclic parts are left out."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if depth > 12:
        return "..."
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(item, depth + 1), sort_keys=True) for item in value)
    if hasattr(value, "__dict__") and not callable(value):
        return {"type": type(value).__name__, **_plain(vars(value), depth + 1)}
    return without_addresses(repr(value))
