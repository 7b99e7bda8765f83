"""Tasks from files: ``prompt`` and ``rubric``, a text or a list of points, as JSONL or Parquet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollgym.envs.task_files import Files, FileTasks, Row, load_tasks, text_of


@dataclass(frozen=True, slots=True)
class RubricTask:
    """A task and the points by which its reply is judged."""

    prompt: str
    rubric: tuple[str, ...]


def load_rubric_tasks(files: Files) -> FileTasks[RubricTask]:
    """Load tasks."""
    return load_tasks("Judge", files, parse_rubric_task, _content)


def parse_rubric_task(row: Row) -> RubricTask:
    """The task of a row.

    Raises:
        ValueError: A column is missing.
    """
    rubric: Any = row.get("rubric")
    points: list[Any] = rubric if isinstance(rubric, list) else [rubric]
    if not points or not all(isinstance(point, str) and point.strip() for point in points):
        raise ValueError(f"its rubric is {rubric!r:.60}; a text or a list of texts was expected")
    return RubricTask(text_of(row, "prompt"), tuple(point.strip() for point in points))


def _content(task: RubricTask) -> str:
    return " ".join(task.prompt.split())
