"""Advantages of a run's action tokens where the run recorded none: computed again by the trainer.

The trainer registers the computation under the entry-point group ``rollgym.view``. Without it a report
says that advantages were not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from rollgym.core.types import Episode

GROUP, NAME = "rollgym.view", "advantages"


class AdvantageSource(Protocol):
    """Computes the advantages of recorded episodes."""

    why: str
    """Why nothing can be computed; empty if it can."""
    estimator: str

    @property
    def groups_stand_alone(self) -> bool:
        """Whether a group's advantages depend on nothing outside it."""

    def of_step(self, episodes: Sequence[Episode]) -> dict[str, list[float]]:
        """Advantages by episode id for all episodes of a step, or for a group that stands alone."""


class Unavailable:
    """The source where the trainer is not installed."""

    why = "not recorded, and the trainer that computes advantages is not installed"
    estimator = ""
    groups_stand_alone = False

    def of_step(self, episodes: Sequence[Episode]) -> dict[str, list[float]]:
        """Return no advantages."""
        return {}


def advantage_source(folder: Path) -> AdvantageSource:
    """Return the registered source for a run folder."""
    for entry in entry_points(group=GROUP, name=NAME):
        try:
            source: AdvantageSource = entry.load()(folder)
        except ImportError:
            continue
        return source
    return Unavailable()
