"""Shaping: what is added to the rewards of episodes before they are given credit, and a record of it.

The order is fixed: clip each turn's reward, scale it, subtract penalties, add the bonus, then normalise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rollgym.agents.parsing import make_parser, take_action
from rollgym.errors import UsageError
from rollgym.trainer.credit_types import LARGEST, FloatArray
from rollgym.types import Episode, Group, Turn

FormatCheck = Callable[[Turn], bool]
"""True where a turn's reply did not have the form asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingSettings:
    """How rewards are changed; by default not at all."""

    clip: tuple[float, float] | None = None
    """Least and greatest reward of a turn, as the environment gives it."""
    scale: float = 1.0
    """What the environment's (clipped) reward is multiplied by."""
    turn_penalty: float = 0.0
    """Subtracted from each turn."""
    format_penalty: float = 0.0
    """Subtracted from a turn whose reply did not have the form asked for."""
    success_bonus: float = 0.0
    """Added to the last turn of an episode that succeeded."""
    normalise: Literal["none", "group", "tag", "batch"] = "none"
    """Among which episodes totals are brought to mean 0 and standard deviation 1 (``tag``: environment)."""
    tolerance: float = 1e-6
    """A standard deviation up to this is none: totals are then centred but not divided."""

    def __post_init__(self) -> None:
        if self.normalise not in ("none", "group", "tag", "batch"):
            raise UsageError(f"normalise must be none, group, tag or batch, not {self.normalise!r}.")
        for name in ("turn_penalty", "format_penalty", "tolerance"):
            if not 0 <= getattr(self, name) <= LARGEST:
                raise UsageError(f"{name} must be finite and >= 0, not {getattr(self, name)}.")
        if not 0 < self.scale <= LARGEST:
            raise UsageError(f"scale must be finite and > 0, not {self.scale}.")
        if not math.isfinite(self.success_bonus):
            raise UsageError(f"success_bonus must be finite, not {self.success_bonus}.")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise UsageError(f"clip must be (least, greatest) with least < greatest, not {self.clip}.")
        if self.tolerance != 1e-6 and self.normalise == "none":
            raise UsageError("tolerance is read only where something is normalised; set normalise as well.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shaped:
    """An episode with its rewards before and after shaping."""

    episode: Episode
    raw: FloatArray
    """[turns] as the environment gave them."""
    rewards: FloatArray
    """[turns] ``raw`` and everything in ``record``, summed in order."""
    record: dict[str, list[float]]
    """What was added to each turn, by the name of the setting, in order; only what is switched on."""


def shape(
    groups: Sequence[Group],
    settings: ShapingSettings | None = None,
    *,
    format_missed: FormatCheck | None = None,
) -> list[Shaped]:
    """Shaped rewards of all episodes, group by group. `UsageError` for an episode that failed."""
    settings = settings or ShapingSettings()
    episodes = [episode for group in groups for episode in group.episodes]
    _check(episodes, settings, format_missed)
    shaped = [_shape(episode, settings, format_missed) for episode in episodes]
    if settings.normalise != "none":
        shaped = _normalised(shaped, settings)
    return shaped


def format_check(parser: str) -> FormatCheck:
    """Ask a parser of `rollgym.agents.parsing`, the one that was played with, about each turn's reply."""
    parse = make_parser(parser)
    if any(name == "listed" for name, _ in parse.forms):
        raise UsageError(
            "format_penalty cannot go with the form 'listed': which actions were valid is not recorded with "
            "a turn. Use another agent.parser, or no format_penalty."
        )

    def missed(turn: Turn) -> bool:
        reply = turn.action if turn.response is None else turn.response
        return not take_action(parse, reply)[1]

    return missed


def _check(episodes: Sequence[Episode], settings: ShapingSettings, format_missed: FormatCheck | None) -> None:
    for episode in episodes:
        if episode.outcome.failed:
            raise UsageError(
                f"Episode {episode.spec.episode_id!r} failed ({episode.outcome}), so it has no score. "
                "Refill it or leave it out; a failure is not a reward of 0."
            )
    if settings.format_penalty and format_missed is None:
        raise UsageError(
            "format_penalty needs format_missed, which says whether a turn's reply had the form asked for; "
            "format_check(parser) makes one."
        )
    said = [episode.success is not None for episode in episodes if episode.turns]
    if settings.success_bonus and said and not any(said):
        raise UsageError("success_bonus can never be given: no environment here says what success is.")


def _shape(episode: Episode, settings: ShapingSettings, format_missed: FormatCheck | None) -> Shaped:
    raw = np.array([turn.reward for turn in episode.turns], dtype=np.float64)
    if raw.size and np.abs(raw).max() > LARGEST:
        raise UsageError(f"Episode {episode.spec.episode_id!r} has a reward beyond {LARGEST:g}.")
    added: dict[str, FloatArray] = {}
    rewards = raw
    if settings.clip is not None:
        added["clip"] = np.clip(raw, *settings.clip) - raw
        rewards = np.clip(raw, *settings.clip)
    if settings.scale != 1:
        added["scale"] = rewards * (settings.scale - 1)
    if settings.turn_penalty:
        added["turn_penalty"] = np.full(len(raw), -settings.turn_penalty)
    if settings.format_penalty and format_missed is not None:
        missed = np.array([format_missed(turn) for turn in episode.turns], dtype=np.float64)
        added["format_penalty"] = -settings.format_penalty * missed
    if settings.success_bonus:
        added["success_bonus"] = np.zeros(len(raw))
        added["success_bonus"][-1:] = settings.success_bonus * (episode.success is True)
    return _with(Shaped(episode=episode, raw=raw, rewards=raw, record={}), added)


def _with(shaped: Shaped, added: dict[str, FloatArray]) -> Shaped:
    """More added to the rewards, and to the record."""
    rewards = shaped.rewards
    for amounts in added.values():
        rewards = rewards + amounts
    record = shaped.record | {name: amounts.tolist() for name, amounts in added.items()}
    return Shaped(episode=shaped.episode, raw=shaped.raw, rewards=rewards, record=record)


def _normalised(shaped: Sequence[Shaped], settings: ShapingSettings) -> list[Shaped]:
    """Totals of mean 0 and standard deviation 1: turns are divided, and the mean is taken off the last turn.

    The statistics count each episode once. One without turns has nowhere to put a reward, and is not counted.
    """
    pools: dict[str, list[float]] = {}
    for one in shaped:
        if one.episode.turns:
            pools.setdefault(_pool(one.episode, settings.normalise), []).append(float(one.rewards.sum()))
    made = []
    for one in shaped:
        totals = np.array(pools.get(_pool(one.episode, settings.normalise), [0.0]))
        std = totals.std() if totals.std() > settings.tolerance else 1.0
        rewards = one.rewards / std
        rewards[-1:] -= totals.mean() / std
        made.append(_with(one, {"normalise": rewards - one.rewards}))
    return made


def _pool(episode: Episode, among: str) -> str:
    spec = episode.spec
    return {"group": spec.group_id, "tag": spec.env_id}.get(among, "")
