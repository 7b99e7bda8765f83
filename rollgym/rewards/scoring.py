"""The `Scorer` protocol, the `Score` of an episode, and its conversion from plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

import numpy as np

from rollgym.core.errors import RewardError, UsageError
from rollgym.core.serialization import clean_text
from rollgym.core.types import Episode


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one episode."""

    reward: float
    """Added to the last turn's reward."""
    success: bool | None = None
    """True if the task succeeded; ``None`` keeps the environment's value."""
    parts: dict[str, float] = field(default_factory=dict)
    """Components of the reward, for the record."""
    note: str = ""
    """A comment for the record."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", _number("reward", self.reward))
        object.__setattr__(self, "success", _verdict(self.success))
        object.__setattr__(self, "parts", _parts(self.parts))
        object.__setattr__(self, "note", _note(self.note))


class Scorer(Protocol):
    """Scores finished episodes, many at once. ``name`` and ``close()`` are optional."""

    async def score(self, episode: Episode) -> Score:
        """Return the episode's score. An exception fails the episode; a cancelled call must stop."""


def read_score(answer: Any, *, strict: bool = True) -> Score:
    """Make a score from a number or ``{"reward": x, "success": …, "parts": …, "note": …}``.

    Anything else raises a `RewardError`, as do unknown keys with ``strict``.
    """
    if isinstance(answer, Score):
        return answer
    fields = dict(answer) if isinstance(answer, Mapping) else {"reward": answer}
    if "reward" not in fields:
        raise RewardError("'reward' is missing")
    values = {name: fields.pop(name) for name in ("reward", "success", "parts", "note") if name in fields}
    if strict and fields:
        unknown = ", ".join(sorted(map(repr, fields)))
        raise RewardError(f"unknown keys {unknown}: use reward, success, parts and note")
    try:
        return Score(**values)
    except (TypeError, ValueError) as error:
        raise RewardError(f"invalid score: {error}") from None


def check_timeout(seconds: float) -> float:
    """Return the timeout of a reward; raise a `UsageError` unless it is positive and finite."""
    if not 0 < seconds < math.inf:
        raise UsageError(f"The timeout of a reward must be positive and finite, not {seconds}.")
    return seconds


def _number(name: str, value: Any) -> float:
    if not isinstance(value, Real | np.bool_):
        raise TypeError(f"the {name} must be a number, not {_shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"the {name} must be finite, not {number}")
    return number


def _verdict(value: Any) -> bool | None:
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    raise TypeError(f"success must be true, false or null, not {_shown(value)}")


def _parts(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"parts must map names to numbers, not {_shown(value)}")
    return {clean_text(str(name)): _number(f"part {name!r}", part) for name, part in value.items()}


def _note(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the note must be text, not {_shown(value)}")
    return clean_text(value)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return f"a {type(value).__name__}"
