"""Validation of the environment's arguments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from rollgym.core.env import check_whole
from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_choice
from rollgym.envs.sokoban.game import DEFAULT_MAX_STEPS
from rollgym.envs.sokoban.generate import Rules, floor_needed
from rollgym.envs.sokoban.levels import Level, content_hash, load_levels

PRESETS = {
    "6x6": Rules(height=6, width=6, boxes=1, min_moves=3, max_moves=10),
    "8x8": Rules(height=8, width=8, boxes=2, min_moves=5, max_moves=30),
    "10x10": Rules(height=10, width=10, boxes=4, min_moves=10, max_moves=60),
}
MAX_SIDE = 30


class LevelRequest(NamedTuple):
    """The arguments that decide which levels are made, as the user gave them (or did not)."""

    size: Any
    boxes: int | None
    min_moves: int | None
    max_moves: int | None
    max_steps: int | None

    def settle(self, preset: str, *, from_file: bool) -> tuple[Rules, int]:
        """The rules for the generator and the step limit.

        Without ``max_steps`` the limit is twice ``max_moves`` (gym-sokoban's 120 for levels of a file). A
        limit below ``max_moves`` lowers it, so that every level can be solved within the limit.
        """
        check_choice("preset of Sokoban", preset, PRESETS)
        for name, value in self._asdict().items():
            if name != "size" and value is not None:
                check_whole(name, value)
        if from_file:
            self._refuse_rules()
            return PRESETS[preset], self.max_steps or DEFAULT_MAX_STEPS
        base = _base_rules(PRESETS[preset], self.size, self.boxes)
        max_moves = self.max_moves or base.max_moves
        limit = self.max_steps or 2 * max_moves
        max_moves = min(max_moves, limit)
        min_moves = self.min_moves or min(base.min_moves, max_moves)
        if min_moves > max_moves:
            raise UsageError(f"min_moves={min_moves} is too much: max_moves or max_steps allows {max_moves}.")
        return Rules(base.height, base.width, base.boxes, min_moves, max_moves), limit

    def _refuse_rules(self) -> None:
        for name, value in self._asdict().items():
            if name != "max_steps" and value is not None:
                raise UsageError(f"{name} is for levels made at random: leave it out with a levels file.")


def check_amount(name: str, value: Any) -> float:
    """Raise unless the value is a finite number of at least 0."""
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise UsageError(f"{name} must be a number, 0 or more, not {value!r}.")
    return float(value)


def _base_rules(preset: Rules, size: Any, boxes: int | None) -> Rules:
    if size is None and boxes is None:
        return preset
    height, width = (preset.height, preset.width) if size is None else _read_size(size)
    count = preset.boxes if boxes is None else boxes
    room = (height - 2) * (width - 2)
    if floor_needed(count) > room:
        raise UsageError(
            f"A room of {height}x{width} has {room} cells inside its walls, too few for boxes={count}: "
            f"it takes {floor_needed(count)}."
        )
    return Rules(height, width, count, min_moves=2 * count + 1, max_moves=count * (height + width))


def _read_size(size: Any) -> tuple[int, int]:
    sides: Any = size
    if isinstance(size, str) and (match := re.fullmatch(r"(\d+)\s*x\s*(\d+)", size.strip().lower())):
        sides = [int(side) for side in match.groups()]
    elif isinstance(size, int):
        sides = [size, size]
    is_pair = isinstance(sides, (list, tuple)) and len(sides) == 2
    if not is_pair or not all(type(side) is int and 4 <= side <= MAX_SIDE for side in sides):
        raise UsageError(f"size must be from 4 to {MAX_SIDE} or rows and columns like '7x9', not {size!r}.")
    return sides[0], sides[1]


class FileLevels:
    """The levels of a file as a task set: of every ten, eight train, one dev, one test; and ``all``."""

    def __init__(self, path: str | Path) -> None:
        self._levels = load_levels(path)
        homes: dict[str, list[int]] = {"train": [], "dev": [], "test": []}
        for index in range(len(self._levels)):
            homes[{8: "dev", 9: "test"}.get(index % 10, "train")].append(index)
        self._splits = {split: indices for split, indices in homes.items() if indices}
        self._splits["all"] = list(range(len(self._levels)))
        sizes = {split: len(indices) for split, indices in self._splits.items()}
        self.tasks = TaskSet(f"sokoban-levels-{content_hash(self._levels)}", sizes)

    def level(self, task: Task) -> Level:
        """The level of a task."""
        return self._levels[self._splits[task.split][task.index]]
