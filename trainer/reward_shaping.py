"""Reward shaping: changes to the rewards of episodes before advantages are computed, with a record of them.

The order is fixed: clip each turn's reward, scale it, subtract penalties, add the bonus, normalize.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rollgym.agents.parsing import make_parser, take_action
from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, Group, Turn
from rollgym.trainer.advantages.types import MAX_MAGNITUDE, FloatArray, IntArray, Trajectory

FormatCheck = Callable[[Turn], bool]
"""Returns True if a turn's reply did not have the required format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShapingConfig:
    """Changes to the environment's rewards; by default none."""

    clip: tuple[float, float] | None = None
    """Lower and upper bound of the environment's reward per turn. Default: no clipping."""
    scale: float = 1.0
    """Factor of the environment's (clipped) reward."""
    turn_penalty: float = 0.0
    """Subtracted from the reward of each turn, 0 or more."""
    format_penalty: float = 0.0
    """Subtracted from the reward of a turn whose reply did not have the format of ``agent.parser``."""
    invalid_penalty: float = 0.0
    """Subtracted from the reward of a turn whose action the environment calls invalid (``info["valid"]``)."""
    success_bonus: float = 0.0
    """Added to the reward of the last turn of a successful episode."""
    normalize: Literal["none", "group", "env", "batch"] = "none"
    """Normalize total rewards to mean 0 and standard deviation 1 over the group, environment or batch."""
    tolerance: float = 1e-6
    """Standard deviations up to this count as zero: totals are then centered but not divided."""

    def __post_init__(self) -> None:
        if self.normalize not in ("none", "group", "env", "batch"):
            raise UsageError(f"normalize must be none, group, env or batch, not {self.normalize!r}.")
        for name in ("turn_penalty", "format_penalty", "invalid_penalty", "tolerance"):
            if not 0 <= getattr(self, name) <= MAX_MAGNITUDE:
                raise UsageError(f"{name} must be finite and >= 0, not {getattr(self, name)}.")
        if not 0 < self.scale <= MAX_MAGNITUDE:
            raise UsageError(f"scale must be finite and > 0, not {self.scale}.")
        if not math.isfinite(self.success_bonus):
            raise UsageError(f"success_bonus must be finite, not {self.success_bonus}.")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise UsageError(f"clip must be two bounds, low < high, not {self.clip}.")
        if self.tolerance != 1e-6 and self.normalize == "none":
            raise UsageError("tolerance requires normalize=group, env or batch.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShapedEpisode:
    """An episode with its rewards before and after shaping."""

    episode: Episode
    raw: FloatArray
    """[turns] Rewards of the environment."""
    rewards: FloatArray
    """[turns] ``raw`` plus everything in ``record``, summed in order."""
    record: dict[str, list[float]]
    """Amounts added to each turn by setting name, in order; only settings in use."""

    def trajectory(self, tokens_per_turn: IntArray, **critic: Any) -> Trajectory:
        """Return the input of an advantage estimator; ``critic``: values and per-token rewards."""
        episode = self.episode
        return Trajectory(
            group=episode.spec.group_id,
            name=episode.spec.episode_id,
            env_id=episode.spec.env_id,
            role=episode.spec.role,
            rewards=self.rewards,
            tokens=tokens_per_turn,
            terminated=not episode.outcome.cut_short,
            states=[turn.observation for turn in episode.turns],
            **critic,
        )


def shape_rewards(
    groups: Sequence[Group],
    config: RewardShapingConfig | None = None,
    *,
    format_missed: FormatCheck | None = None,
) -> list[ShapedEpisode]:
    """Shape the rewards of all episodes, group by group.

    Raises:
        UsageError: An episode failed, or a setting cannot be applied to these episodes.
    """
    config = config or RewardShapingConfig()
    episodes = [episode for group in groups for episode in group.episodes]
    _check(episodes, config, format_missed)
    shaped = [_shape(episode, config, format_missed) for episode in episodes]
    if config.normalize != "none":
        shaped = _normalized(shaped, config)
    return shaped


def format_check(parser: str) -> FormatCheck:
    """Return a check of replies against the parser they were played with (see `rollgym.agents.parsing`)."""
    parse = make_parser(parser)
    if any(name == "listed" for name, _ in parse.forms):
        raise UsageError(
            "format_penalty does not support the parser 'listed': episodes do not record which actions were "
            "valid. Use another agent.parser, or remove format_penalty."
        )

    def missed(turn: Turn) -> bool:
        reply = turn.action if turn.response is None else turn.response
        return not take_action(parse, reply)[1]

    return missed


def _check(
    episodes: Sequence[Episode], config: RewardShapingConfig, format_missed: FormatCheck | None
) -> None:
    for episode in episodes:
        if episode.outcome.failed:
            raise UsageError(
                f"Episode {episode.spec.episode_id!r} failed ({episode.outcome}) and has no score. Play it "
                "again or leave it out; a failure is not a reward of 0."
            )
    if config.format_penalty and format_missed is None:
        raise UsageError(
            "format_penalty requires format_missed, which checks the format of a turn's reply: pass "
            "format_check(parser)."
        )
    checked = ["valid" in turn.info for episode in episodes for turn in episode.turns]
    if config.invalid_penalty and checked and not any(checked):
        raise UsageError(
            "invalid_penalty requires an environment that reports info['valid']; none of these does."
        )
    reports = [episode.success is not None for episode in episodes if episode.turns]
    if config.success_bonus and reports and not any(reports):
        raise UsageError("success_bonus requires an environment that reports success; none of these does.")


def _shape(episode: Episode, config: RewardShapingConfig, format_missed: FormatCheck | None) -> ShapedEpisode:
    raw = np.array([turn.reward for turn in episode.turns], dtype=np.float64)
    if raw.size and np.abs(raw).max() > MAX_MAGNITUDE:
        raise UsageError(f"Episode {episode.spec.episode_id!r} has a reward beyond +-{MAX_MAGNITUDE:g}.")
    added: dict[str, FloatArray] = {}
    rewards = raw
    if config.clip is not None:
        added["clip"] = np.clip(raw, *config.clip) - raw
        rewards = np.clip(raw, *config.clip)
    if config.scale != 1:
        added["scale"] = rewards * (config.scale - 1)
    if config.turn_penalty:
        added["turn_penalty"] = np.full(len(raw), -config.turn_penalty)
    if config.format_penalty and format_missed is not None:
        missed = np.array([format_missed(turn) for turn in episode.turns], dtype=np.float64)
        added["format_penalty"] = -config.format_penalty * missed
    if config.invalid_penalty:
        invalid = [turn.info.get("valid") is False for turn in episode.turns]
        added["invalid_penalty"] = -config.invalid_penalty * np.array(invalid, dtype=np.float64)
    if config.success_bonus:
        added["success_bonus"] = np.zeros(len(raw))
        added["success_bonus"][-1:] = config.success_bonus * (episode.success is True)
    return _with(ShapedEpisode(episode=episode, raw=raw, rewards=raw, record={}), added)


def _with(shaped: ShapedEpisode, added: dict[str, FloatArray]) -> ShapedEpisode:
    """Add amounts to the rewards and to the record."""
    rewards = shaped.rewards
    for amounts in added.values():
        rewards = rewards + amounts
    record = shaped.record | {name: amounts.tolist() for name, amounts in added.items()}
    return ShapedEpisode(episode=shaped.episode, raw=shaped.raw, rewards=rewards, record=record)


def _normalized(shaped: Sequence[ShapedEpisode], config: RewardShapingConfig) -> list[ShapedEpisode]:
    """Normalize totals: divide every turn by the standard deviation, subtract the mean from the last turn.

    The statistics count each episode once; an episode without turns has no reward and is not counted.
    """
    pools: dict[str, list[float]] = {}
    for before in shaped:
        if before.episode.turns:
            pools.setdefault(_pool(before.episode, config.normalize), []).append(float(before.rewards.sum()))
    normalized = []
    for before in shaped:
        totals = np.array(pools.get(_pool(before.episode, config.normalize), [0.0]))
        std = totals.std() if totals.std() > config.tolerance else 1.0
        rewards = before.rewards / std
        rewards[-1:] -= totals.mean() / std
        normalized.append(_with(before, {"normalize": rewards - before.rewards}))
    return normalized


def _pool(episode: Episode, among: str) -> str:
    spec = episode.spec
    return {"group": spec.group_id, "env": spec.env_id}.get(among, "")
