"""Durations of groups: slow tasks, their share among started and trained groups, and waves.

A group is *slow* if it takes more than `SLOW_FACTOR` times the median of recent groups. What an earlier group
of the same task took is the expectation for the next one; a task that was not played yet is expected to take
the median of its source. Nothing here has a clock: callers pass the time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from statistics import median

from rollgym.rollout.task_sampler import GroupTask

SLOW_FACTOR = 3.0
"""A group is slow from this multiple of the median seconds on."""
LEAST_GROUPS = 8
"""Finished groups before any group counts as slow."""
RECENT_GROUPS = 256
MAX_TASKS = 100_000
"""Tasks whose seconds are remembered, the most recent ones."""
MAX_DEFERRED_UPDATES = 10
"""Weight updates after which deferred groups start, even if they are fewer than a wave."""


class GroupTimes:
    """Seconds of groups by task, and counts of slow groups among all started and all taken ones."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_GROUPS)
        self._by_source: dict[int, deque[float]] = {}
        self._by_task: OrderedDict[tuple[int, int], float] = OrderedDict()
        self._open: dict[int, tuple[GroupTask, float]] = {}
        """Groups that are playing, and when they began."""
        self._seconds: dict[int, float] = {}
        """The longest time of groups that were started and neither taken nor discarded."""
        self._ended = self._slow_ended = self._taken = self._slow_taken = 0
        self._threshold: float | None = None

    def started(self, task: GroupTask, now: float) -> None:
        """Note the start of a group, or of its next attempt."""
        self._open[task.number] = (task, now)

    def stopped(self, number: int, now: float, *, complete: bool) -> None:
        """Note that a group ended to play, whether it is complete or will be played again."""
        if number not in self._open:
            return
        task, began = self._open.pop(number)
        seconds = max(now - began, self._seconds.get(number, 0.0))
        self._seconds[number] = seconds
        if complete or self._is_slow(seconds):
            self._learn(task, seconds)

    def closed(self, number: int, *, taken: bool) -> None:
        """Note that a group was taken, or dropped or filtered for good."""
        slow = self._is_slow(self._seconds.pop(number, 0.0))
        self._ended += 1
        self._slow_ended += slow
        self._taken += taken
        self._slow_taken += taken and slow

    def expects_slow(self, task: GroupTask) -> bool:
        """Return whether a group of this task is expected to be slow."""
        known = None if task.task is None else self._by_task.get((task.source, task.task))
        own = self._by_source.get(task.source)
        if known is None and own is not None and len(own) >= LEAST_GROUPS:
            known = median(own)
        return known is not None and self._is_slow(known)

    def metrics(self, now: float) -> dict[str, float]:
        """Share of slow groups among those taken and among those started, as far as that is known.

        Groups that still play count as started once they are slow or complete.
        """
        playing = {number: now - began for number, (_, began) in self._open.items()}
        longest = {n: max(playing.get(n, 0.0), s) for n, s in {**playing, **self._seconds}.items()}
        known = {n: s for n, s in longest.items() if self._is_slow(s) or n not in playing}
        started = self._ended + len(known)
        slow = self._slow_ended + sum(map(self._is_slow, known.values()))
        return {
            "slow_started_frac": slow / started if started else 0.0,
            "slow_trained_frac": self._slow_taken / self._taken if self._taken else 0.0,
        }

    def _learn(self, task: GroupTask, seconds: float) -> None:
        self._recent.append(seconds)
        self._by_source.setdefault(task.source, deque(maxlen=RECENT_GROUPS)).append(seconds)
        self._threshold = None
        if task.task is not None:
            self._by_task[task.source, task.task] = seconds
            self._by_task.move_to_end((task.source, task.task))
            while len(self._by_task) > MAX_TASKS:
                self._by_task.popitem(last=False)

    def _is_slow(self, seconds: float) -> bool:
        if len(self._recent) < LEAST_GROUPS:
            return False
        if self._threshold is None:
            self._threshold = SLOW_FACTOR * median(self._recent)
        return seconds > self._threshold


class Waves:
    """Defers groups that are expected to be slow until several can start together."""

    def __init__(self, size: int, expects_slow: Callable[[GroupTask], bool]) -> None:
        self.size = size
        self.deferred: list[int] = []
        self._expects_slow = expects_slow
        self._wave: list[int] = []
        self._since = 0

    def next(self, version: int) -> int | None:
        """The next deferred group whose wave has begun, or ``None``."""
        if not self._wave and self.deferred:
            waited = version - self._since >= MAX_DEFERRED_UPDATES
            if waited or len(self.deferred) >= self.size:
                self._wave, self.deferred = self.deferred, []
        return self._wave.pop(0) if self._wave else None

    def defer(self, task: GroupTask, version: int) -> bool:
        """Defer a group if it is expected to be slow; returns whether it was deferred."""
        if not self._expects_slow(task):
            return False
        if not self.deferred:
            self._since = version
        self.deferred.append(task.number)
        return True

    def waiting(self) -> list[int]:
        """Numbers of the groups that have not started."""
        return [*self._wave, *self.deferred]
