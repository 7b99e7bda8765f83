"""One group's life as a pure state machine: no clock, no tasks, no I/O.

Its members are started, finish one by one in any order, and are refilled where they failed; at some point the
group is ready, or given up. The scheduler does what the machine says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from rollgym.errors import UsageError
from rollgym.scheduler.stream import TaskStream, Ticket
from rollgym.types import Episode, EpisodeSpec, Group, Outcome

Use = Literal["train", "refill", "drop"]
"""What to do with an episode: take it as a member, play it again, or do without it."""

DEFAULT_USE: Mapping[Outcome, Use] = {
    Outcome.TERMINATED: "train",
    Outcome.TRUNCATED: "train",
    Outcome.TURN_LIMIT: "train",
    Outcome.TOKEN_LIMIT: "train",
    Outcome.TIME_LIMIT: "refill",
    Outcome.ENV_ERROR: "refill",
    Outcome.WORKER_LOST: "refill",
    Outcome.ENGINE_ERROR: "refill",
    Outcome.CANCELLED: "drop",
}

# Where infrastructure failed, the same episode is played again; where the episode itself went wrong, playing
# it again in the same way would only go wrong again.
_SAME_AGAIN = frozenset({Outcome.WORKER_LOST, Outcome.ENGINE_ERROR, Outcome.TIME_LIMIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """How groups are made up."""

    size: int = 1
    extra: int = 0
    """Members started beyond the size; once the group is full, those still playing are cancelled."""
    refills: int = 2
    """How many failed members of a group are played again, in all."""
    max_infra_retries: int = 64
    """How many members of a group that were lost with a worker, engine, server or node are played again, in
    all. They use up no refills."""
    when_short: Literal["keep", "drop"] = "keep"
    """What becomes of a group that cannot be filled."""
    least: int = 0
    """The fewest members worth keeping; 0 means two, or one where the size is one."""
    use: Mapping[Outcome, Use] = field(default_factory=lambda: dict(DEFAULT_USE))
    """Outcomes that are not named here are used as `DEFAULT_USE` says."""

    def __post_init__(self) -> None:
        counts = (self.extra, self.refills, self.max_infra_retries)
        if self.size < 1 or min(counts) < 0 or not 0 <= self.least <= self.size:
            raise UsageError(
                "A group needs size >= 1, extra >= 0, refills >= 0, max_infra_retries >= 0 and "
                f"least <= size: {self}."
            )
        for outcome in Outcome:
            if self.use.get(outcome) == "train" and not outcome.trainable:
                raise UsageError(f"Episodes with the outcome {outcome.value!r} can never be trained on.")

    @property
    def fewest(self) -> int:
        """The fewest members a kept group has."""
        return self.least or min(2, self.size)


class GroupStatus(StrEnum):
    """Where a group is."""

    OPEN = "open"
    READY = "ready"
    DROPPED = "dropped"


@dataclass(slots=True)
class Verdict:
    """What the scheduler is to do after a member finished."""

    start: list[EpisodeSpec] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    infrastructure: bool = False
    """Whether ``start`` replaces a member that was lost with its worker, engine, server or node."""


class GroupState:
    """One group while it is played."""

    def __init__(
        self, stream: TaskStream, ticket: Ticket, policy: GroupPolicy, first_attempt: int = 0
    ) -> None:
        self.ticket = ticket
        self.status = GroupStatus.OPEN
        self.refills_left = policy.refills
        self.infra_retries_left = policy.max_infra_retries
        self.running: dict[str, EpisodeSpec] = {}
        self.members: list[Episode] = []
        self._stream = stream
        self._policy = policy
        self._attempts: dict[int, int] = {}
        self._samplings: dict[int, int] = {}
        # A ticket that is issued again (its group was too old to train on) must not reuse episode ids.
        self._first_attempt = first_attempt

    def start(self) -> list[EpisodeSpec]:
        """The first episodes of all members."""
        return [self._issue(member) for member in range(self._policy.size + self._policy.extra)]

    def finish(self, episode: Episode) -> Verdict:
        """A member finished, in whatever way. Late ones of a closed group change nothing."""
        spec = self.running.pop(episode.spec.episode_id, None)
        if spec is None or self.status is not GroupStatus.OPEN:
            return Verdict()
        use = self._policy.use.get(episode.outcome, DEFAULT_USE[episode.outcome])
        verdict = Verdict()
        if use == "train":
            self.members.append(episode)
        elif use == "refill" and self._pay(lost_with_infrastructure(episode), verdict):
            if episode.outcome not in _SAME_AGAIN:
                self._samplings[spec.member] = self._samplings.get(spec.member, 0) + 1
            verdict.start.append(self._issue(spec.member))
        self._settle(verdict)
        return verdict

    def _pay(self, infrastructure: bool, verdict: Verdict) -> bool:
        """Take one retry from the budget of its kind; False where none is left."""
        if (self.infra_retries_left if infrastructure else self.refills_left) <= 0:
            return False
        self.infra_retries_left -= infrastructure
        self.refills_left -= not infrastructure
        verdict.infrastructure = infrastructure
        return True

    def restart(self, episode_id: str) -> EpisodeSpec:
        """Play a member again from its start, in place of the episode under way; this uses up no refill."""
        return self._issue(self.running.pop(episode_id).member)

    @property
    def next_attempt(self) -> int:
        """The first attempt whose episode ids no member has used."""
        return max(self._attempts.values(), default=self._first_attempt)

    def group(self) -> Group:
        """The finished group, members in order of their numbers."""
        members = sorted(self.members, key=lambda episode: episode.spec.member)
        return Group(group_id=self.ticket.group_id, size=self._policy.size, episodes=tuple(members))

    def _settle(self, verdict: Verdict) -> None:
        if len(self.members) == self._policy.size:
            self.status = GroupStatus.READY
            verdict.cancel = list(self.running)
        elif not self.running:
            short = len(self.members)
            keep = self._policy.when_short == "keep" and short >= self._policy.fewest
            self.status = GroupStatus.READY if keep else GroupStatus.DROPPED

    def _issue(self, member: int) -> EpisodeSpec:
        attempt = self._attempts.get(member, self._first_attempt)
        self._attempts[member] = attempt + 1
        spec = self._stream.spec(self.ticket, member, attempt, self._samplings.get(member, 0))
        self.running[spec.episode_id] = spec
        return spec


def lost_with_infrastructure(episode: Episode) -> bool:
    """Whether an episode was lost with its worker, engine, server or node, through no fault of its own."""
    return episode.error is not None and episode.error.infrastructure
