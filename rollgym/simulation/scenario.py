"""A scenario: scheduler settings, latencies, engines, the learner's times, and failures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from pydantic import Field

from rollgym.config.loader import Settings
from rollgym.core.errors import UsageError
from rollgym.rollout.config import SchedulerConfig
from rollgym.simulation.durations import Duration, OptionalDuration
from rollgym.simulation.latencies import Floats, Latencies, ParametricLatencies

Duty = Literal["train", "generate", "both", "environments"]
"""Roles of a node."""


@dataclass(frozen=True)
class EngineModel:
    """The engines of a run: how fast a number of concurrent requests proceeds.

    Each engine decodes its requests together: a token of each takes ``step[n]`` seconds with ``n`` requests.
    The time to read prompts is spread over the tokens of the replies (``reading`` each).
    """

    engines: int = 1
    lent: int = 0
    """Engines on devices of the learner: they sleep during an update. The first ones."""
    step: tuple[float, ...] = (1.0, 1.0)
    """Seconds of a decoding step by the number of requests, from 0; at most the last one run at once."""
    reading: float = 0.0
    """Seconds of an engine to read prompts, for each token that it generates."""
    free: bool = False
    """Whether a reply takes as long as its work says, however many there are: with recorded latencies."""

    def __post_init__(self) -> None:
        if self.engines < 1 or not 0 <= self.lent <= self.engines or len(self.step) < 2:
            raise UsageError(
                f"Engines need engines >= 1, 0 <= lent <= engines and a time of a step, got {self}."
            )

    @property
    def at_once(self) -> int:
        """Most requests that one engine generates at once."""
        return len(self.step) - 1

    @cached_property
    def per_unit(self) -> Floats:
        """Seconds that each of ``n`` requests needs for a unit of its work, by ``n``."""
        counts = np.arange(len(self.step))
        seconds: Floats = np.array(self.step) + counts * self.reading
        return seconds

    def seconds_per_unit(self, count: int) -> float:
        """Seconds that each of ``count`` requests needs for a unit of work; those beyond the limit share."""
        if self.free:
            return 1.0
        most = self.at_once
        return float(self.per_unit[min(count, most)]) * max(1.0, count / most)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTimes:
    """Seconds of the parts of a step in which the learner works."""

    train: tuple[float, ...] = (1.0,)
    """An update with everything before it: moving state, scoring, optimizer steps. Drawn from these."""
    sync: tuple[float, ...] = (0.1,)
    """A weight sync, during which no engine generates."""
    checkpoint: float = 0.0
    """Writing a checkpoint."""
    checkpoint_every: int = 10
    evaluation_every: int = 0
    evaluation_episodes: int = 0

    @property
    def mean_train(self) -> float:
        """Mean seconds of an update."""
        return sum(self.train) / len(self.train)

    @property
    def mean_sync(self) -> float:
        """Mean seconds of a weight sync."""
        return sum(self.sync) / len(self.sync)


class Failures(Settings):
    """Mean times between failures anywhere in the run, and the times until the lost part is back.

    An unset time between failures means that this kind never fails. Failures are independent of each other.
    """

    node: OptionalDuration = Field(default=None, gt=0)
    """Between losses of a node, whatever runs on it."""
    engine: OptionalDuration = Field(default=None, gt=0)
    """Between deaths of an engine actor."""
    env: OptionalDuration = Field(default=None, gt=0)
    """Between deaths of an environment actor."""
    learner: OptionalDuration = Field(default=None, gt=0)
    """Between deaths of a rank of the learner."""
    straggler: OptionalDuration = Field(default=None, gt=0)
    """Between slow-downs of a node."""
    node_back: Duration = Field(default=1800.0, ge=0)
    """Until a lost node is replaced."""
    engine_back: Duration = Field(default=120.0, ge=0)
    """Until a dead engine generates again."""
    env_back: Duration = Field(default=30.0, ge=0)
    """Until a dead environment actor is replaced."""
    learner_back: Duration = Field(default=300.0, ge=0)
    """Until the learner is restarted from its checkpoint, after the loss of a rank or of its node."""
    straggler_lasts: Duration = Field(default=1800.0, ge=0)
    """How long a node stays slow."""
    straggler_factor: float = Field(default=1.5, ge=1, le=100)
    """Factor of its times while it is slow."""

    @property
    def any(self) -> bool:
        """Whether anything fails."""
        return any(
            value is not None for value in (self.node, self.engine, self.env, self.learner, self.straggler)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Numbers of nodes by what they are for."""

    train: int = 1
    generate: int = 0
    both: int = 0
    environments: int = 0
    engines_each: float = 1.0
    """Engines lost with a node that generates."""
    env_actors: int = 1
    cpus: int = 0
    """CPU cores of all nodes."""
    devices: int = 1
    train_devices: int = 1
    engine_devices: int = 1

    @property
    def total(self) -> int:
        """All nodes."""
        return self.train + self.generate + self.both + self.environments


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a simulation needs to know about a run."""

    scheduler: SchedulerConfig
    batch: int
    """Groups per training step."""
    latencies: Latencies = field(default_factory=ParametricLatencies)
    engine: EngineModel = field(default_factory=EngineModel)
    learner: LearnerTimes = field(default_factory=LearnerTimes)
    nodes: Nodes = field(default_factory=Nodes)
    failures: Failures = field(default_factory=Failures)
    filtered: float = 0.0
    """Share of groups that the zero-variance filter discards."""
    replays_log: bool = True
    """Whether steps after a checkpoint are trained again from the log, without playing: asynchronous runs."""
    waits_for_node: bool = False
    """Whether the run stops until a lost node of the learner is replaced (``devices.when_lost: wait``)."""
    trained_tokens: float = 0.0
    """Tokens of an episode that the learner reads, prompts included; 0: unknown."""
    layout: str = "split"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.batch > self.scheduler.ahead:
            raise UsageError(
                f"A simulated step takes at least 1 and at most max_ahead={self.scheduler.ahead} groups, "
                f"not {self.batch}."
            )

    @property
    def bound(self) -> int:
        """The staleness bound."""
        return self.scheduler.max_staleness or 0

    @property
    def members(self) -> int:
        """Episodes that a group starts."""
        return self.scheduler.groups.size + self.scheduler.groups.oversample

    @property
    def in_flight(self) -> int:
        """Most episodes that can run at once."""
        return min(self.scheduler.max_in_flight, self.scheduler.ahead * self.members)

    def is_filtered(self, number: int) -> bool:
        """Whether the zero-variance filter would discard this group."""
        if not self.scheduler.filter_zero_variance or not self.filtered:
            return False
        return bool(np.random.default_rng((self.seed, 1 << 29, number)).random() < self.filtered)

    def train_seconds(self, step: int) -> float:
        """Seconds of this step's update."""
        return self._drawn(self.learner.train, step, 1)

    def sync_seconds(self, step: int) -> float:
        """Seconds of this step's weight sync."""
        return self._drawn(self.learner.sync, step, 2)

    def _drawn(self, values: tuple[float, ...], step: int, stream: int) -> float:
        if len(values) == 1:
            return values[0]
        rng = np.random.default_rng((self.seed, (1 << 28) + stream, step))
        return values[int(rng.integers(len(values)))]

    @property
    def turns_per_step(self) -> float:
        """Expected turns that one training step consumes."""
        return self.batch * self.members * self.latencies.mean_turns

    def latest_version(self, counts: dict[int, int], version: int, places: int) -> float:
        """As `GroupBuffer`: the version whose tokens the next chosen group must have, or older; inf: any.

        Args:
            counts: Number of protected open groups by the oldest version that their tokens may have.
            version: The version of the weights.
            places: Groups that the batch still lacks.
        """
        if self.scheduler.max_staleness is None:
            return math.inf
        bound = self.scheduler.max_staleness
        total = sum(count for old, count in counts.items() if old < version - bound)
        for later in range(bound + 1):
            total += counts.get(version - bound + later, 0)
            if total - later * self.batch >= max(places, 1):
                return version - bound + later
        return math.inf
