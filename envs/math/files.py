r"""Problems from files: the formats of GSM8K and MATH, as JSONL or Parquet.

GSM8K: ``question`` and ``answer``, whose final answer follows ``####``.
MATH: ``problem`` and ``solution``, whose final answer is in ``\boxed{}``; ``answer`` instead of it, and
``level`` (3 or ``Level 3``), where there are.
"""

from __future__ import annotations

import re

from rollgym.envs.answers import boxes, trim
from rollgym.envs.math.problems import Problem
from rollgym.envs.task_files import Files, FileTasks, Row, load_tasks, text_of


def load_problems(files: Files) -> FileTasks[Problem]:
    """Load problems; each row's columns decide its format."""
    return load_tasks("Math", files, parse_problem, _content)


def _content(problem: Problem) -> str:
    return " ".join(problem.text.split())


def parse_problem(row: Row) -> Problem:
    """The problem of a row.

    Raises:
        ValueError: The row has neither format, or no final answer.
    """
    if "problem" in row:
        answer = row.get("answer")
        solved = str(answer) if answer not in (None, "") else _boxed(text_of(row, "solution"))
        return Problem(text=text_of(row, "problem"), answer=trim(solved), level=_level(row.get("level")))
    if "question" in row and "answer" in row:
        answer = str(row["answer"])
        final = trim(answer.rpartition("####")[2])
        if not final or ("\n" in final):
            raise ValueError(f"its answer has no final answer after ####: {answer[-60:]!r}")
        return Problem(text=text_of(row, "question"), answer=final, level=_level(row.get("level")))
    raise ValueError(
        f"it has the columns {', '.join(map(str, row))}; expected question and answer (GSM8K), or problem "
        "and solution (MATH)"
    )


def _boxed(solution: str) -> str:
    found = boxes(solution)
    if not found or not found[-1].strip():
        raise ValueError(f"its solution has no final answer in \\boxed{{}}: {solution[-60:]!r}")
    return found[-1]


def _level(value: object) -> int | None:
    match = re.fullmatch(r"(?:Level )?(\d+)", str(value))
    return int(match[1]) if match else None
