"""Advantages of a recorded run, recomputed for `rollgym view`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollgym.core.errors import RollgymError, one_line
from rollgym.core.roles import by_turns, role_groups
from rollgym.core.types import Episode, Group
from rollgym.trainer.advantages import find_estimator
from rollgym.trainer.config import POLICY, TrainConfig, load_recorded
from rollgym.trainer.data.sequences import token_episode
from rollgym.trainer.reward_shaping import format_check, shape_rewards

WITH_CRITIC = ("gae",)
"""Estimators that need the critic's values, which no file contains."""
WITHIN_GROUP = ("grpo", "dr_grpo", "rloo", "gigpo")
"""Estimators whose advantages depend on the episodes of one group only."""


class RecomputedAdvantages:
    """Applies a run's estimator to the recorded episodes of one step."""

    def __init__(self, folder: Path) -> None:
        self.why = ""
        """Why advantages cannot be computed; empty if they can."""
        self.estimator = ""
        self._config: TrainConfig | None = None
        try:
            self._config = load_recorded(folder / "config.yaml", folder)
        except RollgymError as error:
            self.why = f"not recorded, and config.yaml cannot be read: {one_line(error)}"
        except OSError:
            self.why = "not recorded, and config.yaml cannot be read"
        else:
            self.estimator = self._config.estimator
            self.why = _unavailable(self._config)

    @property
    def groups_stand_alone(self) -> bool:
        """Whether a group's advantages depend on no other group."""
        config = self._config
        if config is None or self.estimator not in WITHIN_GROUP or config.advantage.whiten != "none":
            return False
        return config.reward_shaping.normalize in ("none", "group")

    def of_step(self, episodes: Sequence[Episode]) -> dict[str, list[float]]:
        """Return advantages by episode id, for all episodes of a step or for a group that stands alone."""
        if self.why or self._config is None or not episodes:
            return {}
        try:
            return _advantages(episodes, self._config)
        except Exception as error:  # the episodes come from a file: whatever they break, the page is made
            self.why = f"not recorded, and cannot be computed: {one_line(error)}"
            return {}


def _unavailable(config: TrainConfig) -> str:
    if config.estimator in WITH_CRITIC:
        return f"not recorded, and {config.estimator} needs the critic's values"
    if config.loss.kl_coef and config.loss.kl_in == "reward":
        return "not recorded, and the KL penalty was part of the reward"
    return ""


def _advantages(episodes: Sequence[Episode], config: TrainConfig) -> dict[str, list[float]]:
    parser = format_check(config.agent.parser) if config.reward_shaping.format_penalty else None
    trajectories = [
        shaped.trajectory(token_episode(shaped.episode).tokens_per_turn)
        for shaped in shape_rewards(
            role_groups(_groups(episodes), POLICY), config.reward_shaping, format_missed=parser
        )
    ]
    result = find_estimator(config.estimator)(trajectories, config.advantage)
    parts = {t.name: a.tolist() for t, a in zip(trajectories, result.advantages, strict=True)}
    return {episode.spec.episode_id: by_turns(episode, parts) for episode in episodes}


def _groups(episodes: Sequence[Episode]) -> list[Group]:
    members: dict[str, list[Episode]] = {}
    for episode in episodes:
        members.setdefault(episode.spec.group_id, []).append(episode)
    return [Group(group_id=name, size=len(own), episodes=tuple(own)) for name, own in members.items()]
