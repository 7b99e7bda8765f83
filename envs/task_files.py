"""Tasks from data files: rows become tasks, with splits that the files name or that a hash makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollgym.core.errors import UsageError
from rollgym.core.seeding import stable_digest
from rollgym.core.tasks import DEFAULT_SPLITS, Task, TaskSet
from rollgym.io.rows import Rows, open_rows

T = TypeVar("T")
Row = Mapping[str, Any]
Files = str | Mapping[str, str]
"""A file, or a file for each split."""


@dataclass(frozen=True, slots=True)
class FileTasks(Generic[T]):
    """The tasks of a file or of one file for each split."""

    tasks: TaskSet
    contents: Mapping[str, tuple[T, ...]]

    def content(self, task: Task) -> T:
        """The content of a task."""
        return self.contents[task.split][task.index]


def load_tasks(name: str, files: Files, parse: Callable[[Row], T], key: Callable[[T], str]) -> FileTasks[T]:
    """Load tasks from JSONL, Parquet or Arrow files; every row is checked at once.

    Args:
        name: Start of the name of the task set; a hash of the content follows.
        files: With one file, the column ``split`` assigns each row to a split; without it, a hash of ``key``
            puts a tenth each into dev and test. With a file for each split, rows belong to its split.
        parse: Makes the content of a row; raises ValueError with what is wrong with the row.
        key: Content by which two tasks are the same.

    Raises:
        UsageError: A file cannot be read, or a row is not a task; the message says which file and line.
    """
    if isinstance(files, str):
        return _load(name, ((None, files, _stamp(files)),), parse, key)
    if not files:
        raise UsageError("No data file given: expected a file, or a file for each split.")
    named = tuple((split, str(path), _stamp(str(path))) for split, path in files.items())
    return _load(name, named, parse, key)


def _stamp(path: str) -> tuple[int, int]:
    """Size and time of a file, so that a changed file is read again; a pattern or folder has none."""
    try:
        stat = Path(path).stat()
    except OSError:
        return (0, 0)  # opening it reports what is wrong
    return (stat.st_size, stat.st_mtime_ns)


# Cached: every environment of a pool's process shares one copy of the tasks.
@lru_cache(maxsize=16)
def _load(
    name: str,
    files: tuple[tuple[str | None, str, tuple[int, int]], ...],
    parse: Callable[[Row], T],
    key: Callable[[T], str],
) -> FileTasks[T]:
    homes = TaskSet(name, DEFAULT_SPLITS)
    contents: dict[str, list[T]] = {}
    fingerprints: list[str] = []
    seen: dict[str, tuple[str, Rows, int]] = {}
    for split, path, _ in files:
        rows = open_rows(path)
        fingerprints.append(rows.fingerprint)
        for number, row in enumerate(rows):
            try:
                content = parse(row)
            except ValueError as error:
                raise UsageError(f"{rows.place(number)}: {error}.") from None
            own = key(content)
            home = split or str(row.get("split") or homes.home(own))
            # Places are computed for messages only: finding the line of a row takes a pass over the file.
            other, others, line = seen.setdefault(own, (home, rows, number))
            if other != home:
                raise UsageError(
                    f"{rows.place(number)} is in the split {home!r}, but {others.place(line)} has the same "
                    f"content in the split {other!r}: remove one of them."
                )
            contents.setdefault(home, []).append(content)
    if not contents:
        raise UsageError(f"{', '.join(path for _, path, _ in files)}: there are no rows.")
    order = sorted(contents, key=lambda split: (split != "train", split))
    digest = stable_digest(*fingerprints, *(split or "" for split, _, _ in files)).hex()[:12]
    splits = {split: len(contents[split]) for split in order}
    return FileTasks(TaskSet(f"{name}-{digest}", splits), {split: tuple(contents[split]) for split in order})


def text_of(row: Row, column: str) -> str:
    """The text of a column; raises ValueError where there is none."""
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"its column {column!r} is {value!r:.80}; text was expected")
    return value.strip()
