"""How long episodes take: drawn from parametric distributions, or resampled from the events of a run.

`Latencies.group` returns all durations of one group, determined by the seed and the group's number alone, so
a group that is played again takes as long as before.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import Field

from rollgym.config.loader import Settings
from rollgym.core.errors import ResultsError, UsageError
from rollgym.io.run_dir import EVENTS, METRICS
from rollgym.rollout.events import Event, read_events
from rollgym.rollout.trace import Span, is_event, spans
from rollgym.simulation.durations import Duration, duration_text

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Unit = Literal["tokens", "seconds"]
"""Unit of the work of a reply: tokens for a modeled engine, seconds as recorded."""
LEAST_EPISODES = 16
"""Finished episodes that a run needs for its latencies to be resampled."""
OUTSIDE_TURNS = ("opening", "resetting", "closing", "scoring")
LEAST_SECONDS = 1e-4
"""Shortest duration of a step and of the start of an episode: no simulated episode takes no time."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The durations of one group: an array per quantity, with one row per member and one column per turn."""

    slow: bool
    start: Floats
    """Seconds to open and reset the environment; of recorded episodes also to close and score it."""
    turns: Ints
    work: Floats
    """Work of each reply, in the unit of its `Latencies`."""
    tokens: Floats
    """Sampled tokens of each reply."""
    step: Floats
    """Seconds of each environment step."""


class Latencies(ABC):
    """A source of `GroupPlan`s."""

    unit: Unit

    @abstractmethod
    def group(self, seed: int, number: int, members: int) -> GroupPlan:
        """The durations of group ``number`` with this many members."""

    @property
    @abstractmethod
    def mean_turns(self) -> float:
        """Expected turns of an episode."""

    @property
    @abstractmethod
    def shortest(self) -> float:
        """Typical seconds of the quickest kind of wait: the resolution that a simulation needs."""

    @abstractmethod
    def describe(self) -> str:
        """The distribution in one line."""


class LatencyWords(Settings):
    """Parametric latencies, as on the command line. Unset values follow from the config and the plan."""

    turns: float | None = Field(default=None, ge=1, le=10_000)
    """Mean turns of an episode. Default: replies of ``agent.max_tokens`` until the plan's tokens are used."""
    turns_sigma: float = Field(default=0.3, ge=0, le=3)
    """Spread of the number of turns (standard deviation of its logarithm)."""
    reply: float | None = Field(default=None, gt=0, le=1e6)
    """Mean tokens of a reply. Default: the plan's reply tokens over its turns."""
    reply_sigma: float = Field(default=0.6, ge=0, le=3)
    """Spread of the length of replies."""
    step: Duration = Field(default=1.0, ge=0, le=86_400)
    """Mean duration of an environment step, such as 500ms or 2s."""
    step_sigma: float = Field(default=0.8, ge=0, le=3)
    """Spread of the duration of environment steps."""
    start: Duration = Field(default=2.0, ge=0, le=86_400)
    """Mean duration of opening and resetting an environment, with the spread of steps."""
    slow: float = Field(default=0.02, ge=0, le=1)
    """Share of slow groups: those of which every step and start takes ``slow_factor`` times as long."""
    slow_factor: float = Field(default=10.0, ge=1, le=10_000)
    """Factor of slow groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametricLatencies(Latencies):  # hashable: its groups are cached
    """Log-normal numbers of turns, lengths of replies and environment steps, with a share of slow groups."""

    turns: float = 8.0
    turns_sigma: float = 0.3
    reply: float = 256.0
    reply_sigma: float = 0.6
    step: float = 1.0
    step_sigma: float = 0.8
    start: float = 2.0
    slow: float = 0.02
    slow_factor: float = 10.0
    seconds_per_token: float = 0.02
    """Rough seconds of a token, for `shortest` only."""

    unit = "tokens"

    @lru_cache(maxsize=8192)  # noqa: B019 - immutable; variants of a run share the groups
    def group(self, seed: int, number: int, members: int) -> GroupPlan:
        """Draw the durations of a group."""
        rng = np.random.default_rng((seed, number))
        slow = bool(rng.random() < self.slow)
        factor = self.slow_factor if slow else 1.0
        turns = np.clip(np.rint(_log_normal(rng, self.turns, self.turns_sigma, members)), 1, 2 * self.turns)
        turns = np.maximum(turns, 1).astype(np.int64)
        shape = (members, int(turns.max()))
        tokens = np.maximum(1.0, np.rint(_log_normal(rng, self.reply, self.reply_sigma, shape)))
        step = factor * _log_normal(rng, self.step, self.step_sigma, shape)
        start = factor * _log_normal(rng, self.start, self.step_sigma, members)
        least = LEAST_SECONDS
        return GroupPlan(slow, np.maximum(start, least), turns, tokens, tokens, np.maximum(step, least))

    @property
    def mean_turns(self) -> float:
        """Expected turns of an episode."""
        return self.turns

    @property
    def shortest(self) -> float:
        """The mean of a step or of a reply, whichever is shorter, or of both if one of them takes no time."""
        waits = [wait for wait in (self.step, self.reply * self.seconds_per_token) if wait > 0.01]
        return min(waits, default=0.01)

    def describe(self) -> str:
        """The distributions in one line."""
        slow = f"; {self.slow:.3g} of the groups are slow, {self.slow_factor:g} times" if self.slow else ""
        return (
            f"parametric: {self.turns:.3g} turns (sigma {self.turns_sigma:g}) of {self.reply:.4g} tokens "
            f"(sigma {self.reply_sigma:g}), steps of {duration_text(self.step)} "
            f"(sigma {self.step_sigma:g}){slow}"
        )


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """The durations of one finished episode of a run."""

    start: float
    turns: tuple[tuple[float, float], ...]
    """Seconds of the reply and of the environment step, by turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLatencies(Latencies):
    """Groups of a recorded run, in their order from a random one on, and again from the first.

    In order, because what slows one episode (a busy machine, a long update) slows those beside it as well:
    drawn one by one, the slowest of a batch would be slower than any recorded batch.
    """

    groups: tuple[tuple[RecordedEpisode, ...], ...]
    train: tuple[float, ...] = ()
    """Seconds of each recorded update."""
    sync: tuple[float, ...] = ()
    """Seconds of each recorded weight sync."""
    source: str = ""
    filtered: float = 0.0
    """Share of the ended groups that the zero-variance filter discarded."""

    unit = "seconds"

    def group(self, seed: int, number: int, members: int) -> GroupPlan:
        """The recorded group of this number; its members with replacement if it has too few."""
        rng = np.random.default_rng((seed, number))
        first = int(np.random.default_rng((seed, 1 << 30)).integers(len(self.groups)))
        group = self.groups[(first + number) % len(self.groups)]
        if len(group) >= members:
            chosen = [group[i] for i in rng.permutation(len(group))[:members]]
        else:
            chosen = [group[i] for i in rng.integers(len(group), size=members)]
        most = max(len(episode.turns) for episode in chosen)
        work, step = np.zeros((members, most)), np.zeros((members, most))
        for row, episode in enumerate(chosen):
            for column, (generate, took) in enumerate(episode.turns):
                work[row, column], step[row, column] = generate, took
        turns = np.array([len(episode.turns) for episode in chosen], dtype=np.int64)
        start = np.maximum([episode.start for episode in chosen], LEAST_SECONDS)
        return GroupPlan(False, start, turns, work, np.ones_like(work), np.maximum(step, LEAST_SECONDS))

    @property
    def mean_turns(self) -> float:
        """Mean turns of the recorded episodes."""
        lengths = [len(episode.turns) for group in self.groups for episode in group]
        return sum(lengths) / len(lengths)

    @property
    def shortest(self) -> float:
        """Median of the longer part of a turn."""
        turns = [turn for group in self.groups for episode in group for turn in episode.turns]
        return max(median(max(turn) for turn in turns), 1e-3)

    def describe(self) -> str:
        """Where the latencies come from."""
        episodes = sum(map(len, self.groups))
        count = f"{episodes} episodes of {len(self.groups)} groups, {len(self.train)} updates"
        return f"recorded in {self.source}: {count}"


def read_latencies(run: Path) -> RecordedLatencies:
    """Read the durations of a run folder from its events and, for updates, its metrics.

    Episodes that failed or were cancelled are left out. So are episodes that were still played at the end.
    """
    if not (run / EVENTS).is_file():
        raise UsageError(f"{run} is not a run folder: it has no {EVENTS}.")
    events = [event for event in read_events(run / EVENTS) if is_event(event)]
    groups = recorded_groups(events)
    count = sum(map(len, groups))
    if count < LEAST_EPISODES:
        raise UsageError(f"{run} has {count} finished episodes: latencies need at least {LEAST_EPISODES}.")
    train, sync = _learner_seconds(run / METRICS)
    ended = [event for event in events if event["kind"] in ("group_taken", "group_discarded")]
    filtered = sum(event.get("reason") == "filtered" for event in ended)
    return RecordedLatencies(
        groups=tuple(groups),
        train=train,
        sync=sync,
        source=str(run),
        filtered=filtered / len(ended) if ended else 0.0,
    )


def recorded_groups(events: Sequence[Event]) -> list[tuple[RecordedEpisode, ...]]:
    """The finished training episodes of an event log, by group, in the order of the groups.

    Groups of the first step are left out if others remain: workers and caches were not warm yet.
    """
    group_of: dict[str, str] = {}
    early: set[str] = set()
    good: set[str] = set()
    updated = False
    for event in events:
        updated = updated or event["kind"] == "weights_updated"
        if event["kind"] == "episode_finished" and isinstance(event.get("group"), str):
            if event.get("outcome") in ("terminated", "truncated", "turn_limit", "token_limit"):
                good.add(event["episode"])
            group_of[event["episode"]] = event["group"]
            if not updated:
                early.add(event["group"])
    own: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans(events):
        if span.episode in good:
            own[span.episode].append(span)
    groups: defaultdict[str, list[RecordedEpisode]] = defaultdict(list)
    for name, states in own.items():
        group = group_of[name]
        turns = _turns(states)
        # Evaluations belong to no group, and their ids say so.
        if group and turns and not name.startswith("eval-"):
            start = sum(span.seconds for span in states if span.state in OUTSIDE_TURNS)
            groups[group].append(RecordedEpisode(start, turns))
    late = [name for name in groups if name not in early]
    kept = late if sum(len(groups[name]) for name in late) >= LEAST_EPISODES else list(groups)
    return [tuple(groups[name]) for name in sorted(kept, key=lambda name: (len(name), name))]


def _turns(states: Iterable[Span]) -> tuple[tuple[float, float], ...]:
    generate: defaultdict[int, float] = defaultdict(float)
    step: defaultdict[int, float] = defaultdict(float)
    last = -1
    for span in states:
        if span.state == "generating":
            generate[span.turn] += span.seconds
            last = max(last, span.turn)
        elif span.state == "stepping":
            step[span.turn] += span.seconds
    return tuple((generate[turn], step[turn]) for turn in range(last + 1))


def _learner_seconds(path: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of updates and weight syncs in a metrics file, except for the first step, which warms up."""
    try:
        lines = path.read_bytes().splitlines()
        steps: list[dict[str, Any]] = [msgspec.json.decode(line, type=dict) for line in lines if line]
    except OSError:
        return (), ()
    except msgspec.DecodeError as error:
        raise ResultsError(f"{path}: not a metrics file ({error}).") from None
    steps = steps[1:] or steps

    def column(name: str) -> tuple[float, ...]:
        values = [step.get(name) for step in steps]
        return tuple(float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v))

    return column("seconds_train"), column("seconds_sync")


def _log_normal(rng: np.random.Generator, mean: float, sigma: float, shape: Any) -> Floats:
    """Log-normal numbers with this mean; ``sigma`` is the standard deviation of their logarithm."""
    if not mean:
        return np.zeros(shape)
    values: Floats = np.exp(rng.normal(math.log(mean) - sigma * sigma / 2, sigma, shape))
    return values
