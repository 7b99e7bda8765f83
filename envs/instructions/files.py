"""Tasks from files in the format of IFEval: ``prompt``, ``instruction_id_list`` and ``kwargs``."""

from __future__ import annotations

import json
from typing import Any

from rollgym.envs.instructions.generate import Instruction
from rollgym.envs.instructions.rules import constraint
from rollgym.envs.task_files import Files, FileTasks, Row, load_tasks, text_of


def load_instructions(files: Files) -> FileTasks[Instruction]:
    """Load tasks; a constraint that is not supported is refused with its name."""
    return load_tasks("Instructions", files, parse_instruction, _content)


def parse_instruction(row: Row) -> Instruction:
    """The task of a row.

    Raises:
        ValueError: A column is missing, or a constraint is not supported.
    """
    names, arguments = _listed(row, "instruction_id_list"), _listed(row, "kwargs")
    if not names or len(names) != len(arguments):
        raise ValueError(f"it has {len(names)} names in instruction_id_list, but {len(arguments)} kwargs")
    made = []
    for name, own in zip(names, arguments, strict=True):
        if not isinstance(own, dict):
            raise ValueError(f"one of its kwargs is {own!r:.60}; an object was expected")
        made.append(constraint(str(name), own))
    return Instruction(text_of(row, "prompt"), tuple(made))


def _listed(row: Row, column: str) -> list[Any]:
    value = row.get(column)
    if isinstance(value, str):  # some copies hold it as JSON text
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, list):
        raise ValueError(f"its column {column!r} is not a list")
    return value


def _content(instruction: Instruction) -> str:
    return " ".join(instruction.prompt.split())
