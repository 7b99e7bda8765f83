"""The task stream: seeded, endless, the same on every machine.

A ticket is one group to be played: an environment, a task and the seeds. Tickets are numbered; what is in a
ticket depends on its number and the seed alone, so a stream can be continued from any number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollgym.errors import UsageError
from rollgym.seeding import derive_seed
from rollgym.tasks import TaskSet
from rollgym.types import EpisodeSpec, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One environment of a mixture, and how large its share of the groups is."""

    env_id: str
    tasks: TaskSet | None = None
    split: str = "train"
    weight: float = 1.0
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    env_version: str = ""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise UsageError(f"The weight of {self.env_id} must be positive and finite, not {self.weight}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One group to be played."""

    number: int
    source: int
    """Which of the stream's sources it is of."""
    task: int | None
    env_seed: int
    group_id: str


class TaskStream:
    """An endless, seeded sequence of tickets from one environment or a mixture."""

    def __init__(self, sources: Sequence[Source], *, seed: int = 0) -> None:
        if not sources:
            raise UsageError("A task stream needs at least one environment.")
        self.sources = tuple(sources)
        self.seed = seed
        self._tickets: list[Ticket] = []
        self._credit = [0.0] * len(self.sources)
        self._orders = [self._order(source, place) for place, source in enumerate(self.sources)]

    def ticket(self, number: int) -> Ticket:
        """The ticket with this number, whether or not the ones before it were ever asked for."""
        while len(self._tickets) <= number:
            self._tickets.append(self._next())
        return self._tickets[number]

    def share(self, source: int) -> float:
        """The share of groups that a source is due."""
        return self.sources[source].weight / sum(source.weight for source in self.sources)

    def spec(self, ticket: Ticket, member: int, attempt: int, sampling_attempt: int) -> EpisodeSpec:
        """The episode of one member of a ticket's group.

        Members and attempts share the environment's seed. A second attempt has the same sampling seed as the
        first unless ``sampling_attempt`` says that the reply itself must differ.
        """
        source = self.sources[ticket.source]
        return EpisodeSpec(
            episode_id=f"{ticket.group_id}-{member}" + (f"-retry{attempt}" if attempt else ""),
            env_id=source.env_id,
            env_kwargs=dict(source.env_kwargs),
            env_version=source.env_version,
            task=ticket.task,
            split=source.split if source.tasks is not None else "",
            env_seed=ticket.env_seed,
            sampling_seed=derive_seed("sampling", self.seed, ticket.number, member, sampling_attempt),
            group_id=ticket.group_id,
            member=member,
            limits=source.limits,
        )

    def _next(self) -> Ticket:
        # Smooth weighted round robin: shares are exact over any longer stretch, and never in bursts.
        for place in range(len(self.sources)):
            self._credit[place] += self.share(place)
        chosen = max(range(len(self.sources)), key=lambda place: (round(self._credit[place], 9), -place))
        self._credit[chosen] -= 1.0
        number = len(self._tickets)
        return Ticket(
            number=number,
            source=chosen,
            task=next(self._orders[chosen]),
            env_seed=derive_seed("stream", self.seed, number),
            group_id=f"g{number:06d}",
        )

    def _order(self, source: Source, place: int) -> Iterator[int | None]:
        if source.tasks is not None:
            yield from source.tasks.order(source.split, derive_seed("stream order", self.seed, place))
        while True:
            yield None
