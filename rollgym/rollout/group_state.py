"""One group as a pure state machine: no clock, no tasks, no I/O.

Its members are started, finish in any order, and are retried where they failed, until the group is ready or
dropped. The scheduler carries out the actions that the machine returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, EpisodeSpec, Group, Outcome, Turn
from rollgym.rollout.retry import RETRIED, LossKind, RetryBudget, RetryPolicy
from rollgym.rollout.task_sampler import GroupTask, TaskSampler

OnOutcome = Literal["train", "retry", "drop"]
"""The use of an episode: take it as a member, run it again, or do without it."""

DEFAULT_ON_OUTCOME: Mapping[Outcome, OnOutcome] = {
    outcome: "train" if outcome.trainable else "retry" if outcome in RETRIED else "drop"
    for outcome in Outcome
}

# After a loss of infrastructure the same episode is run again. After a failure of the episode itself, the
# same samples would only fail again.
_SAME_SAMPLING_SEED = frozenset({Outcome.WORKER_LOST, Outcome.ENGINE_ERROR, Outcome.TIME_LIMIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """Size of a group, its retries, and the handling of incomplete groups.

    Example:
        >>> GroupPolicy(size=8, oversample=2, incomplete_groups="drop")
    """

    size: int = 1
    oversample: int = 0
    """Members started beyond ``size``; once the group is full, those still running are cancelled."""
    max_retries_per_group: int = 2
    """Retries of failed members, per group."""
    max_infra_retries: int = 64
    """Retries of members lost with a worker, engine, server or node, per group. Counted separately."""
    incomplete_groups: Literal["keep", "drop"] = "keep"
    """Handling of groups that cannot be filled."""
    least: int = 0
    """Smallest number of members of a kept group; 0 means 2, or 1 if ``size`` is 1."""
    on_outcome: Mapping[Outcome, OnOutcome] = field(default_factory=lambda: dict(DEFAULT_ON_OUTCOME))
    """Outcomes that are missing here are handled as in `DEFAULT_ON_OUTCOME`."""

    def __post_init__(self) -> None:
        counts = (self.oversample, self.max_retries_per_group, self.max_infra_retries)
        if self.size < 1 or min(counts) < 0 or not 0 <= self.least <= self.size:
            raise UsageError(
                "A group needs size >= 1, oversample >= 0, max_retries_per_group >= 0, "
                f"max_infra_retries >= 0 and least <= size, got {self}."
            )
        for outcome in Outcome:
            if self.on_outcome.get(outcome) == "train" and not outcome.trainable:
                raise UsageError(f"Episodes with the outcome {outcome.value!r} can never be trained on.")

    @property
    def fewest(self) -> int:
        """The smallest number of members of a kept group."""
        return self.least or min(2, self.size)

    @property
    def retry(self) -> RetryPolicy:
        """The retry rules for the members of one group, together."""
        return RetryPolicy(
            max_retries=self.max_retries_per_group,
            max_infra_retries=self.max_infra_retries,
            outcomes={outcome for outcome in Outcome if self.use_of(outcome) == "retry"},
        )

    def use_of(self, outcome: Outcome) -> OnOutcome:
        """The use of episodes with this outcome."""
        return self.on_outcome.get(outcome, DEFAULT_ON_OUTCOME[outcome])


class GroupStatus(StrEnum):
    """The status of a group."""

    OPEN = "open"
    READY = "ready"
    DROPPED = "dropped"


@dataclass(slots=True)
class GroupAction:
    """The scheduler's next actions after a member finished."""

    start: list[EpisodeSpec] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    retried: LossKind | None = None
    """The kind of loss, if ``start`` retries the member."""


class GroupState:
    """One group while its episodes run."""

    def __init__(
        self, sampler: TaskSampler, task: GroupTask, policy: GroupPolicy, first_attempt: int = 0
    ) -> None:
        self.task = task
        self.status = GroupStatus.OPEN
        self.budget = RetryBudget(policy.retry)
        self.running: dict[str, EpisodeSpec] = {}
        """Episodes that were started and have not finished, queued ones included."""
        self.members: list[Episode] = []
        self.oldest: int | None = None
        """The oldest policy version that sampled a token of a finished member."""
        self.newest: int | None = None
        """The newest one."""
        self.began_under: dict[str, int] = {}
        """Running episodes that have begun to generate, and the policy version at that moment: no token of
        theirs is older."""
        self._sampler = sampler
        self._policy = policy
        self._attempts: dict[int, int] = {}
        self._samplings: dict[int, int] = {}
        # A group that is played again (it was too stale to train on) must not reuse episode ids.
        self._first_attempt = first_attempt

    def start(self) -> list[EpisodeSpec]:
        """The first episodes of all members."""
        return [self._issue(member) for member in range(self._policy.size + self._policy.oversample)]

    def finish(self, episode: Episode) -> GroupAction:
        """Take in a finished member. Late members of a closed group change nothing."""
        spec = self.running.pop(episode.spec.episode_id, None)
        self.began_under.pop(episode.spec.episode_id, None)
        action = GroupAction()
        if spec is None or self.status is not GroupStatus.OPEN:
            return action
        if self._policy.use_of(episode.outcome) == "train":
            self.members.append(episode)
            self._note_versions(episode)
        else:
            action.retried = self.budget.spend(episode)
        if action.retried is not None:
            if episode.outcome not in _SAME_SAMPLING_SEED:
                self._samplings[spec.member] = self._samplings.get(spec.member, 0) + 1
            action.start.append(self._issue(spec.member))
        self._update_status(action)
        return action

    def restart(self, episode_id: str) -> EpisodeSpec:
        """Replace a running episode by a new attempt of the same member; this uses up no retry."""
        self.began_under.pop(episode_id, None)
        return self._issue(self.running.pop(episode_id).member)

    @property
    def oldest_possible(self) -> int | None:
        """The oldest version that a token of this group may have, those still generated included."""
        begun = min(self.began_under.values(), default=None)
        return begun if self.oldest is None else self.oldest if begun is None else min(self.oldest, begun)

    @property
    def next_attempt(self) -> int:
        """The first attempt whose episode ids no member has used."""
        return max(self._attempts.values(), default=self._first_attempt)

    def group(self) -> Group:
        """The finished group, ordered by member number."""
        members = sorted(self.members, key=lambda episode: episode.spec.member)
        return Group(group_id=self.task.group_id, size=self._policy.size, episodes=tuple(members))

    def _note_versions(self, episode: Episode) -> None:
        oldest, newest = version_range(episode.turns)
        if oldest is not None and newest is not None:
            self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)
            self.newest = newest if self.newest is None else max(self.newest, newest)

    def _update_status(self, action: GroupAction) -> None:
        if len(self.members) == self._policy.size:
            self.status = GroupStatus.READY
            action.cancel = list(self.running)
        elif not self.running:
            enough = len(self.members) >= self._policy.fewest
            keep = self._policy.incomplete_groups == "keep" and enough
            self.status = GroupStatus.READY if keep else GroupStatus.DROPPED

    def _issue(self, member: int) -> EpisodeSpec:
        attempt = self._attempts.get(member, self._first_attempt)
        self._attempts[member] = attempt + 1
        spec = self._sampler.spec(self.task, member, attempt, self._samplings.get(member, 0))
        self.running[spec.episode_id] = spec
        return spec


def version_range(turns: Iterable[Turn]) -> tuple[int | None, int | None]:
    """The oldest and the newest policy version of any token in these turns; ``None`` where unknown."""
    versions: list[int] = []
    for turn in turns:
        versions += [version for version, _ in turn.version_spans]
        if turn.policy_version is not None:
            versions.append(turn.policy_version)
    return min(versions, default=None), max(versions, default=None)
