"""The group buffer: the state of every group, as a pure state machine without clock or tasks.

Groups are started in order (those expected to be slow may be deferred) and finish in any order. Each group
ends in exactly one way: taken, dropped or filtered.

The staleness bound. A token that version ``v`` sampled may be trained on by updates of the versions ``v`` to
``v + max_staleness``. So a group whose oldest token has version ``v`` must be in one of these batches, and a
batch has room for a limited number of groups. `choose` therefore looks ahead: if ``n`` groups must be in
this batch or one of the next ``j``, at least ``n - j * batch`` of them must be in this one. While no more
places than that are left, no other group is chosen. The rule protects all groups with ``on_stale: wait``, and
else those that were stopped once. With at most ``(max_staleness + 1) * batch`` groups ahead, no protected
group becomes too old.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollgym.core.types import EpisodeSpec, Group
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.group_state import GroupState, GroupStatus, version_range
from rollgym.rollout.pacing import GroupTimes, Waves
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
        self.batch = 1
        """Groups that the current, or else the last, call of `Scheduler.take` asked for."""
        self.turns: Counter[str] = Counter()
        """Turns of ended groups by their use: ``taken``, ``filtered``, ``stale`` or ``lost``."""
        self.times = GroupTimes()
        self.waves: Waves | None = None
        if config.pace_slow_groups:
            batch = config.ahead // ((config.max_staleness or 0) + 1)
            self.waves = Waves(max(1, batch // 2), self.times.expects_slow)
        self._newly_deferred: list[str] = []
        self._replayed: set[int] = set()
        """Groups that were stopped because they were too old, until they are taken or discarded."""
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
        number = self._next_number()
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
        while (state := self._next_state()) is not None:
            group = self._accept(state)
            if group is not None:
                self._count_overtaken(state.task.number)
                self._chosen.append(_Chosen(state.task.number, group, state.next_attempt))
                return group
        return None

    def must_wait(self) -> bool:
        """Whether the caller waits for a group that must be in this batch, although others are ready."""
        return any(state.status is GroupStatus.READY for state in self.open.values())

    def count_chosen(self) -> int:
        """The number of chosen groups, after those that became too stale were requeued."""
        if self._chosen_version != self.version:
            self._chosen_version = self.version
            before, self._chosen = self._chosen, []
            for chosen in before:
                turns = (turn for episode in chosen.group.episodes for turn in episode.turns)
                if self._too_old(*version_range(turns)):
                    self.counts["taken"] -= 1
                    self.turns["taken"] -= _num_turns(chosen.group)
                    self.turns["stale"] += _num_turns(chosen.group)
                    self._requeue_stale(chosen.number, chosen.next_attempt)
                    self._discarded.append(Discarded(chosen.group.group_id, "stale"))
                else:
                    self._chosen.append(chosen)
        return len(self._chosen)

    def pop_chosen(self, count: int) -> list[Group]:
        """Hand over up to ``count`` chosen groups."""
        popped, self._chosen = self._chosen[:count], self._chosen[count:]
        for chosen in popped:
            self._replayed.discard(chosen.number)
            self._first_attempts.pop(chosen.number, None)
            self.times.closed(chosen.number, taken=True)
        self.unreleased += len(popped) if self.hold_slots else 0
        return [chosen.group for chosen in popped]

    def cancel_group(self, group_id: str) -> list[str]:
        """Requeue an open group that is too stale; returns the ids of its episodes that still run."""
        state = self.open.pop(group_id)
        self.turns["stale"] += sum(episode.length for episode in state.members)
        self._requeue_stale(state.task.number, state.next_attempt)
        return list(state.running)

    def restart(self, group_id: str, episode_id: str) -> EpisodeSpec:
        """Restart one member; returns the episode to start."""
        spec = self.open[group_id].restart(episode_id)
        self.counts["restarted"] += 1
        return spec

    def too_old(self, version: int | None) -> bool:
        """Return whether tokens of this version are too old to train on."""
        bound = self.config.max_staleness
        return bound is not None and version is not None and self.version - version > bound

    def outlived(self, state: GroupState, oldest: int | None) -> bool:
        """Return whether an open group with a token of version ``oldest`` can no longer be taken."""
        if self.config.on_stale == "mask":
            return state.status is GroupStatus.READY and self.too_old(state.newest)
        return self.too_old(oldest)

    def note_generating(self, group_id: str, episode_id: str) -> None:
        """Note that an episode begins to generate: its tokens have the current version or a newer one."""
        state = self.open.get(group_id)
        if state is not None and episode_id in state.running:
            state.began_under.setdefault(episode_id, self.version)

    def pop_deferred(self) -> list[str]:
        """Ids of the groups that were deferred since the last call."""
        deferred, self._newly_deferred = self._newly_deferred, []
        return deferred

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
        deferred = self.waves.waiting() if self.waves is not None else []
        return sorted([*opened, *self._requeued, *deferred, *(chosen.number for chosen in self._chosen)])

    def first_attempts(self) -> dict[int, int]:
        """The first unused attempts of groups that were started before, for `requeue`."""
        return {number: attempt for number, attempt in self._first_attempts.items() if attempt}

    def requeue(self, groups: Sequence[int], first_attempts: Mapping[int, int] | None = None) -> None:
        """Start these groups before new ones, with these first attempts where they are not 0."""
        self._requeued = sorted({*self._requeued, *groups})
        self._replayed.update(number for number in groups if (first_attempts or {}).get(number))
        self._first_attempts = Counter({**self._first_attempts, **(first_attempts or {})})

    def _next_number(self) -> int:
        """The number of the next group to start: one to play again, one of a wave, or a new one."""
        if self._requeued:
            return self._requeued.pop(0)
        while True:
            number = None if self.waves is None else self.waves.next(self.version)
            if number is not None:
                return number
            number, self.next_group = self.next_group, self.next_group + 1
            task = self.sampler.group_task(number)
            if self.waves is None or not self.waves.defer(task, self.version):
                return number
            self._newly_deferred.append(task.group_id)

    def _next_state(self) -> GroupState | None:
        """The next finished group to take or discard, or ``None`` if the caller must wait.

        With order ``ready`` it is the one with the oldest tokens: it has the fewest batches left.
        """
        if self.config.order == "strict":
            first = next(iter(self.open.values()), None)
            return None if first is None or first.status is GroupStatus.OPEN else first
        finished = [state for state in self.open.values() if state.status is not GroupStatus.OPEN]
        if not finished:
            return None
        waiting = [state.task.number for state in self.open.values() if state.status is GroupStatus.OPEN]
        last = min((number for number in waiting if self._must_wait_for(number)), default=None)
        latest = self._latest_version()
        for state in sorted(finished, key=_age_order):
            if last is not None and state.task.number > last:
                continue
            if state.status is GroupStatus.DROPPED or latest is None:
                return state
            if self._too_old(state.oldest, state.newest):  # takes no place either
                return state
            if self._protected(state) and state.oldest is not None and state.oldest <= latest:
                return state
        return None

    def _latest_version(self) -> int | None:
        """The version whose tokens the next chosen group must have, or older ones; ``None``: any group.

        See the docstring of the module.
        """
        bound, places = self.config.max_staleness, self.batch - len(self._chosen)
        if bound is None:
            return None
        versions = sorted(
            version
            for state in self.open.values()
            if state.status is not GroupStatus.DROPPED and self._protected(state)
            if (version := state.oldest_possible) is not None
        )
        for later in range(bound + 1):
            latest = self.version - bound + later
            needed = bisect_right(versions, latest) - later * self.batch
            if needed >= max(places, 1):
                return latest
        return None

    def _protected(self, state: GroupState) -> bool:
        """Whether the caller waits for this group rather than let it become too old."""
        return self.config.on_stale == "wait" or state.task.number in self._replayed

    def _accept(self, state: GroupState) -> Group | None:
        """Take a finished group, or discard it."""
        group_id = state.task.group_id
        del self.open[group_id]
        group = state.group()
        if state.status is GroupStatus.DROPPED:
            self._discard(state, "dropped")
            self.turns["lost"] += _num_turns(group)
            return None
        if self._too_old(state.oldest, state.newest):
            self._requeue_stale(state.task.number, state.next_attempt)
            self.turns["stale"] += _num_turns(group)
            self._discarded.append(Discarded(group_id, "stale"))
            return None
        if self._zero_variance(group) and self._filtered_in_a_row < self.config.max_skipped:
            self._filtered_in_a_row += 1
            self._discard(state, "filtered")
            self.turns["filtered"] += _num_turns(group)
            return None
        self._filtered_in_a_row = 0
        self.counts["taken"] += 1
        self.turns["taken"] += _num_turns(group)
        return group

    def _discard(self, state: GroupState, reason: DiscardReason) -> None:
        self.counts[reason] += 1
        self._replayed.discard(state.task.number)
        self._first_attempts.pop(state.task.number, None)
        self.times.closed(state.task.number, taken=False)
        self._discarded.append(Discarded(state.task.group_id, reason))

    def _requeue_stale(self, number: int, attempt: int) -> None:
        self.requeue([number], {number: attempt})
        self.counts["stale"] += 1

    def _too_old(self, oldest: int | None, newest: int | None) -> bool:
        """Whether a finished group has a token that is too old; with ``mask``, no other token."""
        return self.too_old(newest if self.config.on_stale == "mask" else oldest)

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


def _age_order(state: GroupState) -> tuple[bool, float, int]:
    """Dropped groups first, which take no place, then those with the oldest tokens."""
    oldest = math.inf if state.oldest is None else state.oldest
    return state.status is not GroupStatus.DROPPED, oldest, state.task.number


def _num_turns(group: Group) -> int:
    return sum(episode.length for episode in group.episodes)
