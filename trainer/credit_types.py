"""What goes into credit and comes out of it: episodes as arrays, settings, advantages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollgym.errors import UsageError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

LARGEST = 1e100
"""Rewards and values beyond this are a mistake somewhere, and their squares would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One episode as credit sees it. Its arrays are copied and cannot be written to."""

    group: str
    """Id of the group that it is compared in."""
    name: str = ""
    """The episode's id, for messages."""
    tag: str = ""
    """The environment's id, for settings that go by environment."""
    rewards: FloatArray
    """[turns] after shaping."""
    tokens: IntArray
    """[turns] how many action tokens each turn has; may be 0."""
    terminated: bool
    """False where a limit cut the episode short: what would have followed counts as ``last_value``."""
    states: Sequence[Hashable] = ()
    """A key of the state before each turn, for ``gigpo``."""
    values: FloatArray | None = None
    """[action tokens] the critic's value before each."""
    last_value: float = 0.0
    """The critic's value of the state after the last turn; not looked at where the episode terminated."""
    token_rewards: FloatArray | None = None
    """[action tokens] added to the turns' rewards, such as -beta * KL."""

    def __post_init__(self) -> None:
        tokens = np.array(self.tokens)
        whole = tokens.ndim == 1 and (tokens.dtype.kind in "iu" or not tokens.size)
        self._require(whole and bool(np.all(tokens >= 0)), "tokens must be whole numbers >= 0, one a turn")
        tokens = tokens.astype(np.int64)
        rewards = self._numbers("rewards", self.rewards, len(tokens), "turns")
        total = int(tokens.sum())
        for name in ("values", "token_rewards"):
            given = getattr(self, name)
            if given is not None:
                self._set(name, self._numbers(name, given, total, "action tokens"))
        self._numbers("last_value", [self.last_value], 1, "")
        known = len(self.states)
        self._require(known in (0, len(tokens)), f"{known} states are given for {len(tokens)} turns")
        self._set("rewards", rewards)
        self._set("tokens", tokens)

    @property
    def score(self) -> float:
        """The sum of all its rewards, undiscounted."""
        extra = 0.0 if self.token_rewards is None else float(self.token_rewards.sum())
        return float(self.rewards.sum()) + extra

    @property
    def played(self) -> IntArray:
        """How many action tokens each turn has that has any."""
        return self.tokens[self.tokens > 0]

    @property
    def last(self) -> float:
        """What would have followed: 0 where the episode terminated, ``last_value`` where it was cut short."""
        return 0.0 if self.terminated else self.last_value

    @property
    def ends(self) -> IntArray:
        """Where the last action token of each played turn is."""
        return np.cumsum(self.played) - 1

    @property
    def starts(self) -> IntArray:
        """Where the first action token of each played turn is."""
        return self.ends - self.played + 1

    def by_turn(self) -> FloatArray:
        """Rewards of the turns that have action tokens, those of their tokens included."""
        rewards = self._due()
        if self.token_rewards is not None and len(rewards):
            rewards += np.add.reduceat(self.token_rewards, self.starts)
        return rewards

    def by_token(self) -> FloatArray:
        """Rewards of the action tokens: a turn's own comes with its last token."""
        rewards = np.zeros(int(self.tokens.sum()))
        if self.token_rewards is not None:
            rewards += self.token_rewards
        rewards[self.ends] += self._due()
        return rewards

    def _due(self) -> FloatArray:
        """The turns' rewards, where a turn without action tokens counts to the one before it.

        What came before the first action token is due to none of them, and is left out.
        """
        played = np.flatnonzero(self.tokens)
        owner = np.searchsorted(played, np.arange(len(self.tokens)), side="right") - 1
        due = owner >= 0
        rewards = np.zeros(len(played))
        np.add.at(rewards, owner[due], self.rewards[due])
        return rewards

    def __str__(self) -> str:
        return f"trajectory {self.name!r} of group {self.group!r}"

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise UsageError(f"The {self} is not valid: {message}.")

    def _numbers(self, name: str, given: ArrayLike, length: int, unit: str) -> FloatArray:
        numbers = np.array(given, dtype=np.float64)
        self._require(numbers.shape == (length,), f"{name} of shape {numbers.shape} for {length} {unit}")
        bad = np.flatnonzero(~(np.abs(numbers) <= LARGEST))
        self._require(not bad.size, f"{name} holds {numbers[bad[:1]]}; it must be within +-{LARGEST:g}")
        return numbers

    def _set(self, name: str, array: NDArray[Any]) -> None:
        array.setflags(write=False)
        object.__setattr__(self, name, array)


@dataclass(frozen=True, slots=True)
class Credit:
    """What an estimator made of a batch; one array for each trajectory, in the order they were given."""

    advantages: list[FloatArray]
    """[action tokens]"""
    returns: list[FloatArray] | None
    """[action tokens] what the critic should have said; ``None`` where there is no critic."""
    metrics: dict[str, float]


_CHOICES = {
    "discount": ("turn", "token"),
    "level": ("turn", "token"),
    "baseline": ("none", "batch", "tag"),
    "whiten": ("none", "batch", "tag"),
    "weigh": ("trajectory", "token"),
    "divide_by": ("std", "one"),
    "std_correction": (0, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditSettings:
    """Settings of all estimators. One that an estimator does not read must stay at its default."""

    gamma: float = 1.0
    lam: float = 1.0
    """GAE's lambda, in the same unit as ``gamma``."""
    discount: Literal["turn", "token"] = "turn"
    """What ``gamma`` and ``lam`` count: turns (both are 1 inside a turn) or action tokens."""
    level: Literal["turn", "token"] = "turn"
    """Whether GAE takes a step for each turn or for each action token."""
    baseline: Literal["none", "batch", "tag"] = "none"
    """What ``reinforce`` subtracts: the mean return of the batch or of the environment."""
    whiten: Literal["none", "batch", "tag"] = "none"
    """Whether the advantages are brought to one scale at the end, over the batch or each environment."""
    weigh: Literal["trajectory", "token"] = "trajectory"
    """What counts once in a mean over the batch."""
    tolerance: float = 1e-6
    """A standard deviation up to this is none."""
    step_weight: float = 1.0
    """Weight of ``gigpo``'s comparison of equal states."""
    divide_by: Literal["std", "one"] = "std"
    """What ``grpo_turns`` and ``gigpo`` divide differences from the mean by."""
    std_correction: Literal[0, 1] = 0
    """Degrees of freedom taken off a group's standard deviation, as in ``torch.std(correction=)``: 0 divides
    by n, 1 by n - 1 as TRL and verl do. In a group of 8 that makes advantages 6 % smaller."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                choices = " or ".join(map(str, allowed))
                raise UsageError(f"{name} must be {choices}, not {getattr(self, name)!r}.")
        for name, most in (("gamma", 1.0), ("lam", 1.0), ("tolerance", LARGEST), ("step_weight", LARGEST)):
            if not 0 <= getattr(self, name) <= most:
                raise UsageError(f"{name} must be from 0 to {most:g}, not {getattr(self, name)}.")
