"""Inputs and outputs of advantage estimators: trajectories, settings, advantages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollgym.core.errors import UsageError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_MAGNITUDE = 1e100
"""Largest absolute reward or value that is accepted; the square of a larger one could overflow."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One episode as an advantage estimator sees it. The arrays are copied and read-only.

    Arrays over action tokens contain only tokens the policy sampled: observation tokens carry no value,
    reward or discount. Time advances from one turn with action tokens to the next; the reward of a turn
    without action tokens is added to the turn before it.

    Example:
        >>> Trajectory(group="task-7", rewards=[0, 1], tokens=[3, 2], terminated=True).score
        1.0
    """

    group: str
    """Id of the group whose episodes are compared with one another."""
    name: str = ""
    """Episode id, for error messages."""
    env_id: str = ""
    """Environment id, for settings that pool by environment."""
    role: str = ""
    """Role of the agent in the environment; ``gae_states`` keeps the states of different roles apart."""
    rewards: FloatArray
    """[turns] Rewards after reward shaping."""
    tokens: IntArray
    """[turns] Number of action tokens of each turn; may be 0."""
    terminated: bool
    """Whether the task itself ended. False for a truncated episode, which bootstraps from ``last_value``."""
    states: Sequence[Hashable] = ()
    """One key per turn for the state before it; read by ``gigpo`` and ``gae_states``."""
    values: FloatArray | None = None
    """[action tokens] The critic's value before each token."""
    last_value: float = 0.0
    """The critic's value of the state after the last turn; not read if the episode terminated."""
    token_rewards: FloatArray | None = None
    """[action tokens] Rewards in addition to those of the turns, such as ``-beta * KL``."""

    def __post_init__(self) -> None:
        tokens = np.array(self.tokens)
        integers = tokens.ndim == 1 and (tokens.dtype.kind in "iu" or not tokens.size)
        self._require(
            integers and bool(np.all(tokens >= 0)), "tokens must be integers >= 0, one for each turn"
        )
        tokens = tokens.astype(np.int64)
        rewards = self._checked("rewards", self.rewards, len(tokens), "turns")
        num_tokens = int(tokens.sum())
        for name in ("values", "token_rewards"):
            values = getattr(self, name)
            if values is not None:
                self._set(name, self._checked(name, values, num_tokens, "action tokens"))
        self._checked("last_value", [self.last_value], 1, "")
        num_states = len(self.states)
        self._require(num_states in (0, len(tokens)), f"got {num_states} states for {len(tokens)} turns")
        self._set("rewards", rewards)
        self._set("tokens", tokens)

    @property
    def score(self) -> float:
        """The undiscounted sum of all rewards."""
        extra = 0.0 if self.token_rewards is None else float(self.token_rewards.sum())
        return float(self.rewards.sum()) + extra

    @property
    def played(self) -> IntArray:
        """[played turns] Number of action tokens of each turn that has any."""
        return self.tokens[self.tokens > 0]

    @property
    def bootstrap(self) -> float:
        """Value after the last turn: 0 if the episode terminated, ``last_value`` if it was truncated."""
        return 0.0 if self.terminated else self.last_value

    @property
    def ends(self) -> IntArray:
        """[played turns] Index of the last action token of each played turn."""
        return np.cumsum(self.played) - 1

    @property
    def starts(self) -> IntArray:
        """[played turns] Index of the first action token of each played turn."""
        return self.ends - self.played + 1

    def rewards_by_turn(self) -> FloatArray:
        """[played turns] Rewards of the turns that have action tokens, token rewards included."""
        rewards = self._due()
        if self.token_rewards is not None and len(rewards):
            rewards += np.add.reduceat(self.token_rewards, self.starts)
        return rewards

    def rewards_by_token(self) -> FloatArray:
        """[action tokens] Rewards of the tokens; a turn's reward arrives with its last token."""
        rewards = np.zeros(int(self.tokens.sum()))
        if self.token_rewards is not None:
            rewards += self.token_rewards
        rewards[self.ends] += self._due()
        return rewards

    def _due(self) -> FloatArray:
        """Rewards of the played turns, where a turn without action tokens counts to the turn before it.

        Rewards before the first action token are credited to no token and left out.
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
            raise UsageError(f"Invalid {self}: {message}.")

    def _checked(self, name: str, values: ArrayLike, length: int, unit: str) -> FloatArray:
        numbers = np.array(values, dtype=np.float64)
        self._require(
            numbers.shape == (length,), f"{name} has shape {numbers.shape}, expected ({length},) {unit}"
        )
        bad = np.flatnonzero(~(np.abs(numbers) <= MAX_MAGNITUDE))
        self._require(
            not bad.size, f"{name} contains {numbers[bad[:1]]}; it must be within +-{MAX_MAGNITUDE:g}"
        )
        return numbers

    def _set(self, name: str, array: NDArray[Any]) -> None:
        array.setflags(write=False)
        object.__setattr__(self, name, array)


@dataclass(frozen=True, slots=True)
class Advantages:
    """The output of an estimator: one array for each trajectory, in input order."""

    advantages: list[FloatArray]
    """[action tokens] of each trajectory."""
    returns: list[FloatArray] | None
    """[action tokens] Regression targets of the critic; ``None`` for estimators without a critic."""
    metrics: dict[str, float]


_CHOICES = {
    "discount": ("turn", "token"),
    "level": ("turn", "token"),
    "baseline": ("none", "batch", "env"),
    "whiten": ("none", "batch", "env"),
    "weigh": ("trajectory", "token"),
    "normalize_std": (True, False),
    "std_correction": (0, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """Settings of the advantage estimators. A setting that the chosen estimator does not read is refused."""

    gamma: float = 1.0
    """Discount factor, 0 to 1, per turn or per action token (see ``discount``)."""
    lam: float = 1.0
    """GAE lambda, 0 to 1, in the same unit as ``gamma``."""
    discount: Literal["turn", "token"] = "turn"
    """Unit of ``gamma`` and ``lam``: turns (no discount inside a turn) or action tokens."""
    level: Literal["turn", "token"] = "turn"
    """Step of GAE: a whole turn or one action token."""
    baseline: Literal["none", "batch", "env"] = "none"
    """Mean return that ``reinforce`` subtracts: none, of the batch, or of each environment."""
    whiten: Literal["none", "batch", "env"] = "none"
    """Scale the final advantages to standard deviation 1 over the batch or over each environment. Estimators
    without a group baseline are also shifted to mean 0."""
    weigh: Literal["trajectory", "token"] = "trajectory"
    """Whether each trajectory or each token counts once in the statistics of ``baseline`` and ``whiten``."""
    tolerance: float = 1e-6
    """Standard deviations up to this count as zero: such a group or batch gets advantages of 0."""
    step_weight: float = 1.0
    """Weight of ``gigpo``'s step-level advantage relative to its episode-level advantage."""
    state_prior: float = 1.0
    """Visits that the environment's mean return counts for in each state's value of ``gae_states``."""
    normalize_std: bool = True
    """Whether ``grpo_turns`` and ``gigpo`` divide by the standard deviation, or only subtract the mean."""
    std_correction: Literal[0, 1] = 0
    """Degrees of freedom subtracted in a group's standard deviation, as in ``torch.std(correction=)``: 0
    divides by n, 1 by n - 1 as TRL and verl do (advantages 6 % smaller in a group of 8)."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                words = " or ".join(str(choice).lower() for choice in choices)
                raise UsageError(f"{name} must be {words}, not {value!r}.")
        for name, high in (
            ("gamma", 1.0),
            ("lam", 1.0),
            ("tolerance", MAX_MAGNITUDE),
            ("step_weight", MAX_MAGNITUDE),
            ("state_prior", MAX_MAGNITUDE),
        ):
            if not 0 <= getattr(self, name) <= high:
                raise UsageError(f"{name} must be between 0 and {high:g}, not {getattr(self, name)}.")
