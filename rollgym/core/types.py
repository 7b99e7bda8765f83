"""Core data types: frozen, validated on construction, JSON-able.

Every instance is valid, so nothing downstream validates again. An episode is one line of JSON
(`rollgym.core.serialization` writes and reads it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from msgspec import UNSET, UnsetType

from rollgym.core.messages import ToolSpec
from rollgym.core.routed_experts import RoutedExperts

SCHEMA_VERSION = 2
"""Version of the episode line; readers refuse a newer one. Version 2 added tools and messages."""


class Outcome(StrEnum):
    """The way in which an episode ended.

    Example:
        >>> Outcome.TURN_LIMIT.trainable, Outcome.WORKER_LOST.failed
        (True, True)
    """

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    TIME_LIMIT = "time_limit"
    ENV_ERROR = "env_error"
    WORKER_LOST = "worker_lost"
    ENGINE_ERROR = "engine_error"
    CANCELLED = "cancelled"

    @property
    def failed(self) -> bool:
        """True where an error ended the episode; see `Episode.excluded` for whether it has a score."""
        return self in _FAILED

    @property
    def trainable(self) -> bool:
        """True where the episode may enter a training batch (a policy can still refuse it)."""
        return self in _TRAINABLE

    @property
    def cut_short(self) -> bool:
        """True where a limit, not the task, ended the episode."""
        return self in _LIMITS


_FAILED = frozenset({"env_error", "worker_lost", "engine_error", "cancelled"})
_TRAINABLE = frozenset({"terminated", "truncated", "turn_limit", "token_limit"})
_LIMITS = frozenset({"truncated", "turn_limit", "token_limit", "time_limit"})


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on an episode from outside the environment; ``None`` means no limit.

    Example:
        >>> Limits(turns=30, seconds=600.0)
    """

    turns: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("turns", "tokens", "seconds"):
            value = getattr(self, name)
            _require(
                value is None or 0 < value < math.inf,
                f"limits.{name} must be positive and finite, not {value}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A role of an episode that several agents play: its name, its instructions and its tools.

    Example:
        >>> RoleSpec(name="player_2", instructions="Take the last object.")
    """

    name: str
    instructions: str = ""
    """Shown to the agent in this role once, before its first observation."""
    tools: tuple[ToolSpec, ...] = ()
    """Tools that the agent in this role may call."""
    free_text: bool = False
    """True where actions are messages in free text, such as those of a user: an agent sends its whole reply,
    without reasoning, and needs no format for an action in it."""

    def __post_init__(self) -> None:
        _require(bool(self.name), "a role needs a name")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """The complete start of an episode: environment, task, seeds, group, limits and players.

    Example:
        >>> EpisodeSpec(episode_id="test-7-0", env_id="rollgym/Sokoban-v0", task=7, split="test", env_seed=1)
    """

    episode_id: str
    env_id: str
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    env_version: str = ""
    task: int | None = None
    """Index into the split; ``None`` where the environment has no task set."""
    split: str = "train"
    env_seed: int = 0
    """Seed of the environment's randomness: equal for the members of a group."""
    sampling_seed: int = 0
    """Seed of the agent's randomness: different for each member."""
    group_id: str = ""
    member: int = 0
    limits: Limits = field(default_factory=Limits)
    role: str = ""
    """The role whose reward and success are those of the episode. Empty: the first role, or the only one."""
    players: dict[str, str] = field(default_factory=dict)
    """The name of the agent in each role; empty where one agent plays the whole episode."""

    def __post_init__(self) -> None:
        _require(bool(self.episode_id), "episode_id must not be empty")
        _require(bool(self.env_id), "env_id must not be empty")
        _require(self.task is None or self.task >= 0, f"task must be >= 0, not {self.task}")
        _require(self.env_seed >= 0, f"env_seed must be >= 0, not {self.env_seed}")
        _require(self.sampling_seed >= 0, f"sampling_seed must be >= 0, not {self.sampling_seed}")
        _require(self.member >= 0, f"member must be >= 0, not {self.member}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Time of a turn, by phase, in seconds."""

    queue: float = 0.0
    generate: float = 0.0
    step: float = 0.0

    def __post_init__(self) -> None:
        _require(math.isfinite(self.total), f"a turn's seconds must be finite, not {self}")

    @property
    def total(self) -> float:
        """The sum of all phases."""
        return self.queue + self.generate + self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens and cost of a turn at a language-model endpoint."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    """In the currency of the configured prices; 0 without prices."""

    def __post_init__(self) -> None:
        _require(math.isfinite(self.cost), f"a cost must be finite, not {self.cost}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of an episode: the observation, the agent's action, the reward and flags that followed.

    ``prompt_ids`` are the token ids this turn *added* to the conversation before the agent's reply;
    ``action_ids`` are the sampled ids, with one rollout log-prob each. Both are empty for agents that are not
    token models.

    Example:
        >>> Turn(observation="The lock is closed.", action="25", reward=1.0, terminated=True).ends
        True
    """

    observation: str
    action: str
    """The action passed to the environment."""
    response: str | None = None
    """The agent's full reply, where the action is only a part of it."""
    message: dict[str, Any] | None = None
    """The reply by its parts (content, reasoning, tool calls) in OpenAI's form, from an agent that calls
    tools."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """The ``info`` that the environment returned."""
    prompt_ids: tuple[int, ...] = ()
    action_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    new_row: bool = False
    """True where the chat template rewrote history: ``prompt_ids`` start a new training sequence."""
    policy_version: int | None = None
    """The oldest weight version that sampled a token of the reply."""
    version_spans: tuple[tuple[int, int], ...] = ()
    """(weight version, number of action tokens), in order."""
    finish_reason: str | None = None
    seconds: Seconds = field(default_factory=Seconds)
    usage: Usage | None = None
    role: str = ""
    """The role that acted; empty in an episode of one agent."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The reward of each role that followed. ``reward`` is that of `EpisodeSpec.role`."""
    routed_experts: RoutedExperts | UnsetType = UNSET
    """Experts that the engine chose for the tokens up to the last but one of ``action_ids``, from the first
    that no earlier turn covers, if the engine reports them. Files of episodes leave them out."""

    def __post_init__(self) -> None:
        _require(math.isfinite(self.reward), f"a reward must be finite, not {self.reward}")
        for role, reward in self.rewards.items():
            _require(math.isfinite(reward), f"a reward must be finite, not {reward} of {role}")
        _require(
            not self.logprobs or len(self.logprobs) == len(self.action_ids),
            f"{len(self.action_ids)} action_ids but {len(self.logprobs)} logprobs",
        )
        _require(all(math.isfinite(x) for x in self.logprobs), "a log-prob must be finite")
        spanned = sum(count for _, count in self.version_spans)
        _require(
            not self.version_spans or spanned == len(self.action_ids),
            f"version_spans cover {spanned} of {len(self.action_ids)} action_ids",
        )

    @property
    def ends(self) -> bool:
        """True where the environment ended the episode with this turn, by either flag."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error as data: its type, message and traceback."""

    type: str
    message: str
    traceback: str = ""
    by_agent: bool = False
    """True where the agent may have caused it: it then counts as a failure of the agent."""
    infrastructure: bool = False
    """True where infrastructure failed, not the episode: its worker, engine, server or node was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One finished episode, whatever its outcome.

    Example:
        >>> episode = next(rollgym.load_run("runs/demo").episodes)
        >>> episode.outcome, episode.success, episode.total_reward, episode.length
        (<Outcome.TERMINATED: 'terminated'>, True, 1.0, 6)
    """

    spec: EpisodeSpec
    outcome: Outcome
    turns: tuple[Turn, ...] = ()
    instructions: str = ""
    """Shown to the agent once, before the first observation."""
    tools: tuple[ToolSpec, ...] = ()
    """Tools that the agent could call."""
    reset_info: dict[str, Any] = field(default_factory=dict)
    final_observation: str = ""
    final_ids: tuple[int, ...] = ()
    """Token ids that the final observation would have added to the conversation, if a limit ended the
    episode: a critic needs them to estimate the value of the final state."""
    final_row: bool = False
    """True where ``final_ids`` start a new training sequence."""
    success: bool | None = None
    """Success as the environment defines it; ``None`` where it defines none, or the episode failed."""
    error: Failure | None = None
    attempts: int = 1
    started: float = 0.0
    """Unix time."""
    seconds: float = 0.0
    """Wall time from start to end."""
    roles: tuple[RoleSpec, ...] = ()
    """The roles of the episode; empty where one agent plays it. See `rollgym.core.roles`."""

    def __post_init__(self) -> None:
        _require(self.attempts >= 1, f"attempts must be >= 1, not {self.attempts}")
        _require(
            math.isfinite(self.started) and math.isfinite(self.seconds),
            f"an episode's times must be finite, not {self.started} and {self.seconds}",
        )
        for number, turn in enumerate(self.turns[:-1]):
            _require(not turn.ends, f"turn {number} ended the episode but is not the last turn")
        flags = self.turns[-1] if self.turns else None
        if self.outcome is Outcome.TERMINATED:
            _require(
                flags is not None and flags.terminated,
                "outcome 'terminated' needs a last turn with terminated=true",
            )
        if self.outcome is Outcome.TRUNCATED:
            _require(
                flags is not None and flags.truncated and not flags.terminated,
                "outcome 'truncated' needs a last turn with truncated=true, terminated=false",
            )
        if self.outcome.failed:
            _require(self.success is None, f"a failed episode ({self.outcome}) has no success")
        _require(
            self.error is None or self.outcome.failed,
            f"an episode with an error cannot have the outcome '{self.outcome}'",
        )

    @property
    def excluded(self) -> bool:
        """True where infrastructure ended the episode: it has no score and is counted separately.

        An error that the agent may have caused is not excluded: otherwise failing would raise its score.
        """
        return self.outcome.failed and not (self.error is not None and self.error.by_agent)

    @property
    def scored_success(self) -> bool | None:
        """Success as it counts in a score: false where the agent caused an error.

        ``None`` where the episode is excluded, or the environment does not define success.
        """
        if not self.outcome.failed:
            return self.success
        return None if self.excluded or self.reset_info.get("success") is None else False

    @property
    def total_reward(self) -> float:
        """The undiscounted return: the sum of the turns' rewards (infinite beyond a float's range)."""
        try:
            return math.fsum(turn.reward for turn in self.turns)
        except OverflowError:
            return sum(turn.reward for turn in self.turns)

    @property
    def length(self) -> int:
        """The number of turns."""
        return len(self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Episodes of one task that are compared with each other (GRPO); members are identified by id.

    Example:
        >>> Group(group_id="train-7", size=8).complete
        False
    """

    group_id: str
    size: int
    episodes: tuple[Episode, ...] = ()

    def __post_init__(self) -> None:
        _require(self.size >= 1, f"a group has at least one member, not {self.size}")
        members = [episode.spec.member for episode in self.episodes]
        _require(len(set(members)) == len(members), f"group {self.group_id} holds a member twice")
        _require(
            len(members) <= self.size, f"group {self.group_id} takes {self.size} members, not {len(members)}"
        )
        for episode in self.episodes:
            spec = episode.spec
            _require(
                spec.group_id == self.group_id,
                f"episode {spec.episode_id} belongs to group {spec.group_id!r}, not {self.group_id!r}",
            )
            _require(
                _start(spec) == _start(self.episodes[0].spec),
                f"members of group {self.group_id} start from different states",
            )

    @property
    def complete(self) -> bool:
        """True once all members are present."""
        return len(self.episodes) >= self.size


def _start(spec: EpisodeSpec) -> tuple[object, ...]:
    task = spec.split, spec.task, spec.env_seed
    return spec.env_id, spec.env_kwargs, spec.env_version, *task, spec.role, spec.players
