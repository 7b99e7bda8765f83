"""The `Scorer` protocol, the `Score` it gives an episode, and how one is read from plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

import numpy as np

from rollgym.errors import RewardError
from rollgym.records import clean_text
from rollgym.types import Episode


@dataclass(frozen=True, slots=True)
class Score:
    """What a scorer says of an episode."""

    reward: float
    """Added to the last turn's reward."""
    success: bool | None = None
    """Whether the task is achieved; ``None`` leaves what the environment said."""
    parts: dict[str, float] = field(default_factory=dict)
    """What the reward is made of, for the record."""
    note: str = ""
    """A word for the record."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", _number("reward", self.reward))
        object.__setattr__(self, "success", _verdict(self.success))
        object.__setattr__(self, "parts", _parts(self.parts))
        object.__setattr__(self, "note", _note(self.note))


class Scorer(Protocol):
    """Scores finished episodes, many at once. ``name`` and ``close()`` are used where there are any."""

    async def score(self, episode: Episode) -> Score:
        """The episode's score. Whatever it raises is an outcome of the episode; a cancelled call stops."""


def read_score(answer: Any, *, strict: bool = True) -> Score:
    """A score out of a number, or out of ``{"reward": x, "success": …, "parts": …, "note": …}``.

    Anything else is a `RewardError`; so is a key that nobody reads, where ``strict``.
    """
    if isinstance(answer, Score):
        return answer
    fields = dict(answer) if isinstance(answer, Mapping) else {"reward": answer}
    if "reward" not in fields:
        raise RewardError("it gave no 'reward'")
    known = {name: fields.pop(name) for name in ("reward", "success", "parts", "note") if name in fields}
    if strict and fields:
        unread = ", ".join(sorted(map(repr, fields)))
        raise RewardError(f"it gave {unread}, which nobody reads: give reward, success, parts and note")
    try:
        return Score(**known)
    except (TypeError, ValueError) as error:
        raise RewardError(f"it gave a bad score: {error}") from None


def _number(what: str, value: Any) -> float:
    if not isinstance(value, Real | np.bool_):
        raise TypeError(f"the {what} must be a number, not {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"the {what} must be finite, not {number}")
    return number


def _verdict(value: Any) -> bool | None:
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    raise TypeError(f"success must be true, false or nothing, not {_shown(value)}")


def _parts(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"parts must be numbers by name, not {_shown(value)}")
    return {clean_text(str(name)): _number(f"part {name!r}", part) for name, part in value.items()}


def _note(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the note must be text, not {_shown(value)}")
    return clean_text(value)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"a {type(value).__name__}"
