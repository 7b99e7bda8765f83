"""Random terminal tasks from the families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rollgym.core.errors import UsageError
from rollgym.core.tasks import Task, TaskSet
from rollgym.envs.arguments import check_choice
from rollgym.envs.terminal.families.archives import ARCHIVES
from rollgym.envs.terminal.families.base import LEVELS, Kind
from rollgym.envs.terminal.families.files import FILES
from rollgym.envs.terminal.families.git import GIT
from rollgym.envs.terminal.families.logs import LOGS
from rollgym.envs.terminal.families.scripts import SCRIPTS
from rollgym.envs.terminal.families.text import TEXT
from rollgym.envs.terminal.types import TerminalTask

SPLITS = {"train": 20_000, "dev": 1_000, "test": 1_000}
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (*FILES, *TEXT, *GIT, *SCRIPTS, *LOGS, *ARCHIVES)}
FAMILIES = tuple(dict.fromkeys(kind.family for kind in KINDS.values()))


class Generated:
    """Tasks generated from the task's number; splits are disjoint."""

    def __init__(self, families: Sequence[str] | None = None, level: int | None = None) -> None:
        if level is not None and level not in LEVELS:
            raise UsageError(f"level must be 1, 2 or 3 (or left out for all), not {level!r}.")
        if isinstance(families, str) or (families is not None and not families):
            raise UsageError(f"families must be a list of names of {', '.join(FAMILIES)}, not {families!r}.")
        for family in families or ():
            check_choice("family of terminal tasks", family, FAMILIES)
        self.families = tuple(family for family in FAMILIES if families is None or family in families)
        self._kinds = [kind for kind in KINDS.values() if kind.family in self.families]
        self._levels = LEVELS if level is None else (level,)
        self.tasks = TaskSet(f"Terminal-{level or 'all'}-{'-'.join(self.families)}", SPLITS)

    def load(self, task: Task) -> TerminalTask:
        """Draw the task from its generator."""
        return self.tasks.draw(task, self._random, lambda made: made.key)

    def _random(self, rng: np.random.Generator) -> TerminalTask:
        # Families weigh the same, whatever the number of their kinds.
        family = self.families[int(rng.integers(len(self.families)))]
        kinds = [kind for kind in self._kinds if kind.family == family]
        level = self._levels[int(rng.integers(len(self._levels)))]
        return kinds[int(rng.integers(len(kinds)))].task(rng, level)
