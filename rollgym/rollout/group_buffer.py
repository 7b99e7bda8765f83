"""The group buffer: the state of every group, as a pure state machine without clock or tasks.

Groups are started in order and finish in any order; ready ones are taken in an order that does not depend on
how long they took. Each group ends in exactly one way: taken, dropped or filtered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollgym.core.types import EpisodeSpec, Group, Turn
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.group_state import GroupState, GroupStatus
from rollgym.rollout.task_sampler import TaskSampler

DiscardReason = Literal["dropped", "filtered", "stale"]


@dataclass(frozen=True, slots=True)
class Discarded:
    """A group that is not taken.

    ``dropped``: it could not be filled. ``filtered``: its returns are equal. ``stale``: its tokens are too
    old; it is played again.
    """

    group_id: str
    reason: DiscardReason


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A group chosen for the trainer and not yet handed over."""

    number: int
    group: Group
    next_attempt: int


class GroupBuffer:
    """Starts groups and returns finished ones."""

    def __init__(self, sampler: TaskSampler, config: SchedulerConfig, first_group: int = 0) -> None:
        self.sampler = sampler
        self.config = config
        self.next_group = first_group
        """The number of the next new group."""
        self.version = 0
        self.counts: Counter[str] = Counter()
        self.open: dict[str, GroupState] = {}
        """Groups started and not yet taken or discarded, by id, in the order of their numbers."""
        self.hold_slots = False
        """If set, taken groups occupy a slot of ``max_ahead`` until `release`."""
        self.unreleased = 0
        self._chosen: list[_Chosen] = []
        """Waits for the rest of a batch; kept if the caller of `take` gave up waiting."""
        self._chosen_version = 0
        self._requeued: list[int] = []
        self._first_attempts: Counter[int] = Counter()
        self._overtaken: Counter[int] = Counter()
        self._filtered_in_a_row = 0
        self._farthest = 0
        self._discarded: list[Discarded] = []

    def can_start_group(self) -> bool:
        """Return whether another group may start."""
        chosen = len(self._chosen) if self.hold_slots else 0
        return len(self.open) + chosen + self.unreleased < self.config.ahead

    def start_group(self) -> list[EpisodeSpec]:
        """Start the next group; returns the first episodes of its members."""
        if self._requeued:
            number = self._requeued.pop(0)
        else:
            number, self.next_group = self.next_group, self.next_group + 1
        task = self.sampler.group_task(number)
        state = GroupState(self.sampler, task, self.config.groups, self._first_attempts[number])
        in_order = not self.open or number > self.open[next(reversed(self.open))].task.number
        self.open[task.group_id] = state
        if not in_order:
            self.open = dict(sorted(self.open.items(), key=lambda item: item[1].task.number))
        self.counts["started"] += 1
        return state.start()

    def choose(self) -> Group | None:
        """Choose the group to take next, or ``None`` if the caller must wait for one."""
        for state in list(self.open.values()):
            if state.status is GroupStatus.OPEN:
                if self.config.order == "strict" or self._must_wait_for(state.task.number):
                    return None
                continue
            group = self._accept(state)
            if group is not None:
                self._count_overtaken(state.task.number)
                self._chosen.append(_Chosen(state.task.number, group, state.next_attempt))
                return group
        return None

    def count_chosen(self) -> int:
        """The number of chosen groups, after those that became too stale were requeued."""
        if self._chosen_version != self.version:
            self._chosen_version = self.version
            before, self._chosen = self._chosen, []
            for chosen in before:
                if self._too_old(chosen.group):
                    self.counts["taken"] -= 1
                    self._requeue_stale(chosen.number, chosen.next_attempt)
                    self._discarded.append(Discarded(chosen.group.group_id, "stale"))
                else:
                    self._chosen.append(chosen)
        return len(self._chosen)

    def pop_chosen(self, count: int) -> list[Group]:
        """Hand over up to ``count`` chosen groups."""
        popped, self._chosen = self._chosen[:count], self._chosen[count:]
        self.unreleased += len(popped) if self.hold_slots else 0
        return [chosen.group for chosen in popped]

    def cancel_group(self, group_id: str) -> list[str]:
        """Requeue an open group that is too stale; returns the ids of its episodes that still run."""
        state = self.open.pop(group_id)
        self._requeue_stale(state.task.number, state.next_attempt)
        return list(state.running)

    def restart(self, group_id: str, episode_id: str) -> EpisodeSpec:
        """Restart one member; returns the episode to start."""
        spec = self.open[group_id].restart(episode_id)
        self.counts["restarted"] += 1
        return spec

    def too_old(self, oldest: int | None) -> bool:
        """Return whether tokens of this version are too old to train on."""
        bound = self.config.max_staleness
        return bound is not None and oldest is not None and self.version - oldest > bound

    def pop_discarded(self) -> list[Discarded]:
        """The groups discarded since the last call."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def release(self, count: int) -> None:
        """Let as many new groups start in place of groups taken with ``hold_slots``."""
        self.unreleased = max(0, self.unreleased - count)

    def overtaken(self) -> list[GroupState]:
        """The open groups with a smaller number than one that was taken."""
        return [state for state in self.open.values() if state.task.number < self._farthest]

    def unfinished_groups(self) -> list[int]:
        """Numbers of the groups that a resumed run must play again: neither taken nor discarded."""
        opened = [state.task.number for state in self.open.values()]
        return sorted([*opened, *self._requeued, *(chosen.number for chosen in self._chosen)])

    def first_attempts(self) -> dict[int, int]:
        """The first unused attempts of groups that were started before, for `requeue`."""
        return {number: attempt for number, attempt in self._first_attempts.items() if attempt}

    def requeue(self, groups: Sequence[int], first_attempts: Mapping[int, int] | None = None) -> None:
        """Start these groups before new ones, with these first attempts where they are not 0."""
        self._requeued = sorted({*self._requeued, *groups})
        self._first_attempts = Counter({**self._first_attempts, **(first_attempts or {})})

    def _accept(self, state: GroupState) -> Group | None:
        """Take a finished group, or discard it."""
        group_id = state.task.group_id
        del self.open[group_id]
        if state.status is GroupStatus.DROPPED:
            self._discard(group_id, "dropped")
            return None
        group = state.group()
        if self._too_old(group):
            self._requeue_stale(state.task.number, state.next_attempt)
            self._discarded.append(Discarded(group_id, "stale"))
            return None
        if self._zero_variance(group) and self._filtered_in_a_row < self.config.max_skipped:
            self._filtered_in_a_row += 1
            self._discard(group_id, "filtered")
            return None
        self._filtered_in_a_row = 0
        self.counts["taken"] += 1
        return group

    def _discard(self, group_id: str, reason: DiscardReason) -> None:
        self.counts[reason] += 1
        self._discarded.append(Discarded(group_id, reason))

    def _requeue_stale(self, number: int, attempt: int) -> None:
        self.requeue([number], {number: attempt})
        self.counts["stale"] += 1

    def _too_old(self, group: Group) -> bool:
        return self.too_old(oldest_version(turn for episode in group.episodes for turn in episode.turns))

    def _zero_variance(self, group: Group) -> bool:
        if not self.config.filter_zero_variance or len(group.episodes) < 2:
            return False
        if self.config.zero_variance is not None:
            return self.config.zero_variance(group)
        returns = [episode.total_reward for episode in group.episodes]
        return max(returns) - min(returns) <= self.config.equal_tolerance

    def _must_wait_for(self, number: int) -> bool:
        limit = self.config.max_overtakes
        return limit is not None and self._overtaken[number] >= limit

    def _count_overtaken(self, taken: int) -> None:
        self._farthest = max(self._farthest, taken)
        if self.config.max_overtakes is None:
            return
        waiting = [*(state.task.number for state in self.open.values()), *self._requeued]
        self._overtaken = Counter({number: self._overtaken[number] + (number < taken) for number in waiting})


def oldest_version(turns: Iterable[Turn]) -> int | None:
    """The oldest policy version of any token in these turns."""
    versions = (turn.policy_version for turn in turns)
    return min((version for version in versions if version is not None), default=None)
