"""Advantages of a run's action tokens, worked out again as the run did, where it kept none.

The trainer is found by name and may be missing: a report needs none of it. Nothing of it imports torch here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollgym.errors import RollgymError, one_line
from rollgym.files import read_bounded
from rollgym.types import Episode, Group
from rollgym.view.read import MOST_CONFIG

CRITICS = ("gae",)
"""Estimators that need what a critic said, which no file holds."""
GROUPS = ("grpo", "dr_grpo", "rloo", "gigpo")
"""Estimators that compare within a group."""


class Recomputed:
    """The run's estimator on the episodes of one step."""

    def __init__(self, folder: Path) -> None:
        self.why = ""
        """Why nothing can be worked out; empty where it can."""
        self.estimator = ""
        self._config: Any = None
        try:
            settings = importlib.import_module("rollgym.trainer.config").TrainConfig
            self._config = importlib.import_module("rollgym.config").load(settings, _config(folder))
            self.estimator = str(self._config.estimator)
        except ImportError:
            self.why = "not recorded, and the trainer that could work it out is not installed"
        except (RollgymError, OSError):
            self.why = "not recorded, and the settings in config.yaml cannot be read"
        else:
            self.why = self._refuse()

    def _refuse(self) -> str:
        if self.estimator in CRITICS:
            return f"not recorded, and {self.estimator} needs the critic's values"
        if self._config.loss.kl_coef and self._config.loss.kl_in == "reward":
            return "not recorded, and the KL penalty was part of the reward"
        return ""

    @property
    def groups_stand_alone(self) -> bool:
        """Whether a group's advantages depend on nothing outside it."""
        alone = self.estimator in GROUPS and self._config.credit.whiten == "none"
        return alone and self._config.shaping.normalise in ("none", "group")

    def of_step(self, episodes: Sequence[Episode]) -> dict[str, list[float]]:
        """Advantages by episode id, of all that a step was trained on, or of a group that stands alone."""
        if self.why or not episodes:
            return {}
        try:
            return self._of_step(episodes)
        except Exception as error:  # the numbers are a file's: whatever they break, the page is made
            self.why = f"not recorded, and it cannot be worked out: {one_line(error)}"
            return {}

    def _of_step(self, episodes: Sequence[Episode]) -> dict[str, list[float]]:
        shaping, rows = (importlib.import_module(f"rollgym.trainer.{name}") for name in ("shaping", "rows"))
        credit = importlib.import_module("rollgym.trainer.credit")
        config = self._config
        parser = shaping.format_check(config.agent.parser) if config.shaping.format_penalty else None
        shaped = shaping.shape(_groups(episodes), config.shaping, format_missed=parser)
        trajectories = [
            credit.Trajectory(
                group=one.episode.spec.group_id,
                name=one.episode.spec.episode_id,
                tag=one.episode.spec.env_id,
                rewards=one.rewards,
                tokens=rows.token_episode(one.episode).per_turn,
                terminated=not one.episode.outcome.cut_short,
                states=[turn.observation for turn in one.episode.turns],
            )
            for one in shaped
        ]
        found = credit.find_estimator(self.estimator)(trajectories, config.credit)
        return {t.name: a.tolist() for t, a in zip(trajectories, found.advantages, strict=True)}


def _config(folder: Path) -> dict[str, Any]:
    """The settings in the run's own config, which extends no other file."""
    text = read_bounded(folder / "config.yaml", MOST_CONFIG, folder)
    found: dict[str, Any] = importlib.import_module("rollgym.config").parse(text.decode("utf-8", "replace"))
    return found


def _groups(episodes: Sequence[Episode]) -> list[Group]:
    members: dict[str, list[Episode]] = {}
    for episode in episodes:
        members.setdefault(episode.spec.group_id, []).append(episode)
    return [Group(group_id=name, size=len(some), episodes=tuple(some)) for name, some in members.items()]
