"""The task sampler: a seeded, endless sequence of groups to play, identical on every machine.

Groups are numbered. The environment, task and seeds of a group depend on its number, the sampler's seed and
the weights that `TaskSampler.reweigh` set before it, so sampling can continue from any number.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollgym.core.errors import UsageError
from rollgym.core.seeding import derive_seed
from rollgym.core.tasks import TaskSet
from rollgym.core.types import EpisodeSpec, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSource:
    """One environment of a mixture and its share of the groups."""

    env_id: str
    tasks: TaskSet | None = None
    split: str = "train"
    weight: float = 1.0
    """Share of the groups, relative to the other sources."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    env_version: str = ""
    limits: Limits = field(default_factory=Limits)
    role: str = ""
    """As in `EpisodeSpec`."""
    players: Mapping[str, str] = field(default_factory=dict)
    """As in `EpisodeSpec`."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise UsageError(f"The weight of {self.env_id} must be positive and finite, got {self.weight}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """The task of one group: environment, task index and seeds."""

    number: int
    source: int
    """Index into the sampler's sources."""
    task: int | None
    env_seed: int
    group_id: str


class TaskSampler:
    """An endless, seeded sequence of group tasks from one environment or a mixture."""

    def __init__(
        self,
        sources: Sequence[EnvSource],
        *,
        seed: int = 0,
        reweighed: Iterable[tuple[int, Sequence[float]]] = (),
    ) -> None:
        if not sources:
            raise UsageError("A task sampler needs at least one environment.")
        self.sources = tuple(sources)
        self.seed = seed
        self._reweighed: list[tuple[int, tuple[float, ...]]] = []
        # Ten bytes for each group so far: earlier groups may be played again, and a run has millions.
        self._chosen_sources, self._chosen_tasks = array("H"), array("q")
        self._credit = [0.0] * len(self.sources)
        self._orders = [self._order(source, index) for index, source in enumerate(self.sources)]
        for first, weights in reweighed:
            self.reweigh(first, weights)

    def reweigh(self, first: int, weights: Sequence[float]) -> None:
        """Set the weights of the sources from group ``first`` on; earlier groups keep their tasks.

        A sampler that is made with the same calls, as ``reweighed``, gives the same groups.
        """
        if len(weights) != len(self.sources) or not all(0 <= weight < math.inf for weight in weights):
            raise ValueError(f"expected {len(self.sources)} finite weights of 0 or more, got {weights}")
        if not sum(weights):
            raise ValueError("at least one weight must be positive")
        if first < len(self._chosen_tasks) or (self._reweighed and first < self._reweighed[-1][0]):
            raise ValueError(f"group {first} has a task already: its weights cannot change")
        self._reweighed.append((first, tuple(weights)))

    def group_task(self, number: int) -> GroupTask:
        """The task of group ``number``, whether or not earlier ones were requested."""
        while len(self._chosen_tasks) <= number:
            self._choose_next()
        task = self._chosen_tasks[number]
        return GroupTask(
            number=number,
            source=self._chosen_sources[number],
            task=None if task < 0 else task,
            env_seed=derive_seed("stream", self.seed, number),
            group_id=f"g{number:06d}",
        )

    def share(self, source: int, number: int = 0) -> float:
        """The fraction of groups that a source gets at group ``number``."""
        weights = next(
            (weights for first, weights in reversed(self._reweighed) if first <= number),
            tuple(source.weight for source in self.sources),
        )
        return weights[source] / sum(weights)

    def spec(self, task: GroupTask, member: int, attempt: int, sampling_attempt: int) -> EpisodeSpec:
        """The episode of one member of a group.

        Members and attempts share the environment's seed. A second attempt has the same sampling seed as the
        first unless ``sampling_attempt`` differs.
        """
        source = self.sources[task.source]
        return EpisodeSpec(
            episode_id=f"{task.group_id}-{member}" + (f"-retry{attempt}" if attempt else ""),
            env_id=source.env_id,
            env_kwargs=dict(source.env_kwargs),
            env_version=source.env_version,
            task=task.task,
            split=source.split if source.tasks is not None else "",
            env_seed=task.env_seed,
            sampling_seed=derive_seed("sampling", self.seed, task.number, member, sampling_attempt),
            group_id=task.group_id,
            member=member,
            limits=source.limits,
            role=source.role,
            players=dict(source.players),
        )

    def _choose_next(self) -> None:
        # Smooth weighted round robin: shares are exact over any longer stretch, and never in bursts.
        number = len(self._chosen_tasks)
        for index in range(len(self.sources)):
            self._credit[index] += self.share(index, number)
        chosen = max(range(len(self.sources)), key=lambda index: (round(self._credit[index], 9), -index))
        self._credit[chosen] -= 1.0
        task = next(self._orders[chosen])
        self._chosen_sources.append(chosen)
        self._chosen_tasks.append(-1 if task is None else task)

    def _order(self, source: EnvSource, index: int) -> Iterator[int | None]:
        if source.tasks is not None:
            yield from source.tasks.order(source.split, derive_seed("stream order", self.seed, index))
        while True:
            yield None
