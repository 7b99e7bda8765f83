"""The tick level: every episode and turn of a step at full size, advanced together in small ticks.

For steps of thousands of episodes, where the real scheduler in virtual time would take minutes. Episodes are
rows of arrays; in each tick all replies and all environment steps advance by the same time. Groups are taken
by the rules of `rollgym.rollout.group_buffer` (see `_Buffer`), which tests compare with the real one.

Not modeled here: ``pace_slow_groups``, ``max_overtakes`` and failures.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rollgym.simulation.latencies import Floats, GroupPlan, Ints
from rollgym.simulation.samples import StepSample
from rollgym.simulation.scenario import Scenario

IDLE, STEPPING, GENERATING = 0, 1, 2
AGES = 64
"""Versions whose tokens are counted apart; older ones are added to the oldest of these."""
TICKS_PER_WAIT = 4.0
TICKS_PER_STEP = 150.0
"""Resolution: a fraction of the shortest kind of wait, but at most about this many ticks in a step."""


@dataclass(eq=False, slots=True)
class _Group:
    number: int
    plan: GroupPlan
    needed: int
    """Members that complete the group."""
    finished: int = 0
    rows: set[int] = field(default_factory=set)
    queued: int = 0
    oldest: int | None = None
    """Oldest version of a token of a finished member."""
    newest: int | None = None
    began: int | None = None
    """Version when the first member began to generate."""
    turns: int = 0
    """Turns of finished members."""
    tokens: Floats | None = None
    """Tokens of finished members by version, modulo `AGES`."""
    ready: bool = False
    listed: bool = False
    """Whether the buffer lists it as ready."""
    counted: int | None = None
    """Version under which the buffer counts it."""

    @property
    def oldest_possible(self) -> int | None:
        if self.ready or self.began is None:
            return self.oldest
        return self.began if self.oldest is None else min(self.began, self.oldest)


class _Buffer:
    """The rules of `GroupBuffer` for groups whose members never fail."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.config = scenario.scheduler
        self.version = 0
        self.open: dict[int, _Group] = {}
        self.unreleased = 0
        self.requeued: list[int] = []
        self.replayed: set[int] = set()
        self.next_group = 0
        self.filtered_in_a_row = 0
        self._counts: dict[int, int] = {}
        """Protected open groups by the oldest version that their tokens may have."""
        self._ready: list[tuple[int, int]] = []
        """Oldest version and number of ready groups, in this order."""
        self.changed = False

    def can_start(self, chosen: int) -> bool:
        return len(self.open) + chosen + self.unreleased < self.config.ahead

    def next_number(self) -> int:
        if self.requeued:
            return self.requeued.pop(0)
        self.next_group += 1
        return self.next_group - 1

    def too_old(self, version: int | None) -> bool:
        bound = self.config.max_staleness
        return bound is not None and version is not None and self.version - version > bound

    def protected(self, group: _Group) -> bool:
        return self.config.on_stale == "wait" or group.number in self.replayed

    def requeue(self, group: _Group) -> None:
        self.requeued = sorted([*self.requeued, group.number])
        self.replayed.add(group.number)

    def note(self, group: _Group) -> None:
        """Keep the counts by version and the order of ready groups after a change of a group."""
        is_open = group.number in self.open
        oldest = group.oldest_possible if is_open and self.protected(group) else None
        if oldest != group.counted:
            if group.counted is not None:
                self._counts[group.counted] -= 1
            if oldest is not None:
                self._counts[oldest] = self._counts.get(oldest, 0) + 1
            group.counted = oldest
        if is_open and group.ready and not group.listed:
            group.listed = True
            insort(self._ready, (group.oldest or 0, group.number))
            self.changed = True

    def remove(self, group: _Group) -> None:
        """Take a group out of the buffer."""
        del self.open[group.number]
        if group.listed:
            self._ready.remove((group.oldest or 0, group.number))
            group.listed = False
        self.note(group)

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def choose(self, places: int) -> tuple[list[_Group], list[_Group], list[_Group]]:
        """Up to ``places`` groups to take now, those that are filtered, and those to play again."""
        taken: list[_Group] = []
        filtered: list[_Group] = []
        stale: list[_Group] = []
        if not self.changed:  # only a group that gets ready can be chosen
            return taken, filtered, stale
        self.changed = False
        if self.config.order == "strict":
            while len(taken) < places and (first := next(iter(self.open.values()), None)) is not None:
                if not first.ready:
                    break
                self._accept(first, taken, filtered, stale)
        else:
            while len(taken) < places:
                latest = self.scenario.latest_version(self._counts, self.version, places - len(taken))
                ready = (self.open[number] for _, number in self._ready)
                group = next((one for one in ready if self._may_take(one, latest)), None)
                if group is None:
                    break
                self._accept(group, taken, filtered, stale)
        self.changed = len(taken) == places
        return taken, filtered, stale

    def _may_take(self, group: _Group, latest: float) -> bool:
        if latest == math.inf or self._is_stale(group):
            return True
        return self.protected(group) and group.oldest is not None and group.oldest <= latest

    def _is_stale(self, group: _Group) -> bool:
        return self.too_old(group.newest if self.config.on_stale == "mask" else group.oldest)

    def _accept(
        self, group: _Group, taken: list[_Group], filtered: list[_Group], stale: list[_Group]
    ) -> None:
        self.remove(group)
        if self._is_stale(group):
            self.requeue(group)
            stale.append(group)
        elif self.scenario.is_filtered(group.number) and self.filtered_in_a_row < self.config.max_skipped:
            self.filtered_in_a_row += 1
            self.replayed.discard(group.number)
            filtered.append(group)
        else:
            self.filtered_in_a_row = 0
            self.replayed.discard(group.number)
            taken.append(group)


def simulate_ticks(
    scenario: Scenario, steps: int, *, on_step: Callable[[int], object] = lambda step: None
) -> list[StepSample]:
    """Simulate training steps with every episode, in ticks."""
    return _Ticks(scenario, on_step).train(steps)


class _Ticks:
    def __init__(self, scenario: Scenario, on_step: Callable[[int], object]) -> None:
        self.scenario = scenario
        self.buffer = _Buffer(scenario)
        self._on_step = on_step
        rows, engines = scenario.in_flight, scenario.engine.engines
        self.now = 0.0
        self.phase = np.zeros(rows, dtype=np.int8)
        self.left = np.zeros(rows)
        self.turn = np.zeros(rows, dtype=np.int64)
        self.last: Ints = np.zeros(rows, dtype=np.int64)
        self.engine = np.zeros(rows, dtype=np.int64)
        self.made = np.zeros(rows)
        """Work of the current version that each row has generated."""
        self.tokens = np.zeros((rows, AGES))
        self.oldest = np.full(rows, -1, dtype=np.int64)
        self.work = np.zeros((rows, 1))
        self.step = np.zeros((rows, 1))
        self.scale = np.ones(rows)
        """Tokens per unit of work."""
        self.group: list[_Group | None] = [None] * rows
        self.free = list(range(rows))[::-1]
        self.queue: deque[tuple[_Group, int]] = deque()
        self.sessions = np.zeros(engines, dtype=np.int64)
        self.awake = np.ones(engines, dtype=bool)
        self._all_awake = True
        self.paused = False
        self.discarded = self.filtered = self.replayed = 0
        self.sums = np.zeros(6)
        """Integrals since the last step: generating, stepping, both while waiting, busy engines, progress."""
        wait = scenario.learner.mean_train + scenario.learner.mean_sync
        turn = scenario.latencies.shortest
        self.tick = turn / TICKS_PER_WAIT
        self._least_tick = wait / TICKS_PER_STEP
        limit = scenario.engine.at_once
        self._seconds = np.array([scenario.engine.seconds_per_unit(n) for n in range(min(limit, rows) + 1)])
        self._limit = len(self._seconds) - 1

    def train(self, steps: int) -> list[StepSample]:
        samples = []
        self._start()
        for step in range(steps):
            samples.append(self._train_step(step))
            self.tick = max(
                self.scenario.latencies.shortest / TICKS_PER_WAIT, samples[-1].seconds / TICKS_PER_STEP
            )
            self._on_step(step)
        return samples

    def _train_step(self, step: int) -> StepSample:
        scenario, buffer, began = self.scenario, self.buffer, self.now
        self.sums[:] = 0.0
        self.discarded = self.filtered = self.replayed = 0
        batch: list[_Group] = []
        forced = 0.0
        while True:
            self._choose(batch)
            if len(batch) == scenario.batch:
                break
            is_forced = buffer.has_ready
            seconds = self._advance(math.inf, waiting=True)
            forced += is_forced * seconds
        wait = self.now - began
        in_wait = self.sums[2:4].copy()
        buffer.unreleased += len(batch)
        self._held = 0
        train, sync = scenario.train_seconds(step), scenario.sync_seconds(step)
        self.awake[: scenario.engine.lent] = False
        self._all_awake = not scenario.engine.lent
        self._run_until(self.now + train)
        self.paused = True
        self._run_until(self.now + sync)
        self._new_version()
        self.paused, self.awake[:], self._all_awake = False, True, True
        buffer.unreleased -= len(batch)
        self._start()
        return self._sample(batch, (wait, forced), in_wait, (train, sync), self.now - began)

    def _sample(
        self,
        batch: list[_Group],
        waited: tuple[float, float],
        in_wait: Floats,
        learner: tuple[float, float],
        seconds: float,
    ) -> StepSample:
        scenario, version = self.scenario, self.buffer.version - 1
        both = float(in_wait.sum())
        share = float(in_wait[0]) / both if both else 0.0
        tokens: dict[int, float] = {}
        total = np.sum([group.tokens for group in batch if group.tokens is not None], axis=0)
        for slot in np.flatnonzero(total > 0.5):
            age = int((version - slot) % AGES)
            tokens[age] = float(total[slot])
        masked = 0.0
        if scenario.scheduler.on_stale == "mask":
            masked = sum(count for age, count in tokens.items() if age > scenario.bound)
        generating, stepping = float(self.sums[0]), float(self.sums[1])
        seconds = max(seconds, 1e-12)
        return StepSample(
            wait=waited[0],
            wait_generate=waited[0] * share,
            wait_environment=waited[0] * (1 - share),
            forced=waited[1],
            train=learner[0],
            sync=learner[1],
            turns=sum(group.turns for group in batch),
            discarded=self.discarded,
            filtered=self.filtered,
            tokens=dict(sorted(tokens.items())),
            masked=masked,
            slow=sum(group.plan.slow for group in batch),
            replayed=self.replayed,
            generating=generating / seconds,
            in_flight=(generating + stepping) / seconds,
            engine_busy=float(self.sums[4]) / seconds / scenario.engine.engines,
            progress=float(self.sums[5]) / max(generating + stepping, 1e-12),
        )

    # Time.

    def _run_until(self, end: float) -> None:
        while self.now < end - 1e-9:
            self._advance(end)

    def _advance(self, end: float, *, waiting: bool = False) -> float:
        """Advance all episodes by one tick, or until something can change; returns the seconds."""
        generating = np.flatnonzero(self.phase == GENERATING)
        stepping = np.flatnonzero(self.phase == STEPPING)
        at = self.engine[generating]
        count = np.bincount(at, minlength=len(self.awake))
        speed = self._speed(count)
        rate = speed[at]
        ends = np.concatenate([self.left[stepping], self.left[generating] / np.maximum(rate, 1e-300)])
        first = float(ends.min()) if len(ends) else math.inf
        if first == math.inf and end == math.inf:
            raise AssertionError("nothing plays, and the learner waits")
        seconds = min(max(first, self.tick), end - self.now)
        self.now += seconds
        done = seconds * rate
        # Work beyond the end of a reply is time of the step after it.
        self.made[generating] += np.minimum(done, np.maximum(self.left[generating], 0.0))
        self.left[generating] -= done
        self.left[stepping] -= seconds
        busy = float(((count > 0) & (speed > 0)).sum())
        progress = float(self.turn[generating].sum() + np.maximum(self.turn[stepping] - 1, 0).sum())
        wait = float(waiting)
        self.sums += seconds * np.array(
            [
                len(generating),
                len(stepping),
                wait * len(generating),
                wait * len(stepping),
                busy,
                progress,
            ]
        )
        due = np.concatenate([generating, stepping])
        due = due[self.left[due] <= 0]
        ended = False
        while len(due):  # what is shorter than a tick begins and ends in it
            replied = due[self.phase[due] == GENERATING]
            stepped = due[self.phase[due] == STEPPING]
            over = self.turn[stepped] >= self.last[stepped]
            last = stepped[over]
            self._begin_steps(replied, speed)
            self._begin_replies(stepped[~over], speed)
            for row in last[np.argsort(self.left[last], kind="stable")]:
                if self.group[row] is not None:  # a sibling that ended before may have completed the group
                    self._finish(int(row))
            ended = ended or len(last) > 0
            due = due[(self.phase[due] != IDLE) & (self.left[due] <= 0)]
        if ended:
            self._start()
        return seconds

    def _begin_steps(self, rows: Ints, speed: Floats) -> None:
        over = self.left[rows] / np.maximum(speed[self.engine[rows]], 1e-300)
        self.left[rows] = self.step[rows, self.turn[rows]] + over
        self.turn[rows] += 1
        self.phase[rows] = STEPPING

    def _speed(self, count: Ints) -> Floats:
        """Work per second of each request, by engine."""
        if self.paused:
            return np.zeros(len(count))
        within = np.minimum(count, self._limit)
        seconds = self._seconds[within] * np.maximum(1.0, count / max(self._limit, 1))
        speed: Floats = self.awake / seconds
        return speed

    def _begin_replies(self, rows: Ints, speed: Floats) -> None:
        if not len(rows):
            return
        asleep = rows[~self.awake[self.engine[rows]]]
        if len(asleep) and self.awake.any():  # as the router: a sleeping engine's sessions move on
            for row in asleep:
                self._route(int(row))
        over = self.left[rows] * speed[self.engine[rows]]
        work = self.work[rows, self.turn[rows]]
        self.left[rows] = work + over
        self.made[rows] += np.minimum(-over, work)
        self.phase[rows] = GENERATING
        new = rows[self.oldest[rows] < 0]
        self.oldest[new] = self.buffer.version
        for row in new:
            group = self.group[row]
            if group is not None and group.began is None:
                group.began = self.buffer.version
                self.buffer.note(group)

    def _route(self, row: int) -> None:
        """Assign the awake engine with the fewest sessions."""
        self.sessions[self.engine[row]] -= self.phase[row] != IDLE
        sessions = self.sessions
        if not self._all_awake and self.awake.any():
            sessions = np.where(self.awake, sessions, np.iinfo(np.int64).max)
        best = int(sessions.argmin())
        self.engine[row] = best
        self.sessions[best] += 1

    # Groups.

    def _choose(self, batch: list[_Group]) -> None:
        taken, filtered, stale = self.buffer.choose(self.scenario.batch - len(batch))
        self.filtered += sum(group.turns for group in filtered)
        self.discarded += sum(group.turns for group in stale)
        self.replayed += len(stale)
        batch += taken
        if filtered or stale:
            self._start(len(batch))
            if len(batch) < self.scenario.batch:
                self._choose(batch)
        self._held = len(batch)

    _held = 0
    """Groups chosen for the current batch: they count as ahead."""

    def _start(self, held: int | None = None) -> None:
        """Start groups and episodes as long as there is room."""
        buffer, scenario = self.buffer, self.scenario
        if held is not None:
            self._held = held
        while self.free:
            if self.queue:
                self._start_episode(*self.queue.popleft())
                continue
            if not buffer.can_start(self._held):
                return
            number = buffer.next_number()
            plan = scenario.latencies.group(scenario.seed, number, scenario.members)
            group = _Group(number, plan, scenario.scheduler.groups.size, queued=scenario.members)
            group.tokens = np.zeros(AGES)
            in_order = not buffer.open or number > next(reversed(buffer.open))
            buffer.open[number] = group
            if not in_order:
                buffer.open = dict(sorted(buffer.open.items()))
            self.queue.extend((group, member) for member in range(scenario.members))

    def _start_episode(self, group: _Group, member: int) -> None:
        group.queued -= 1
        if group.number not in self.buffer.open or group.ready:
            return
        row, plan = self.free.pop(), group.plan
        most = plan.work.shape[1]
        if most > self.work.shape[1]:
            grow = ((0, 0), (0, most - self.work.shape[1]))
            self.work, self.step = np.pad(self.work, grow), np.pad(self.step, grow)
        self.group[row] = group
        group.rows.add(row)
        self.work[row, :most], self.step[row, :most] = plan.work[member], plan.step[member]
        self.turn[row], self.last[row] = 0, plan.turns[member]
        work = plan.work[member].sum()
        self.scale[row] = plan.tokens[member].sum() / work if work else 1.0
        self.left[row] = plan.start[member]
        self.oldest[row] = -1
        self.made[row] = 0.0
        self.tokens[row] = 0.0
        self._route(row)
        self.phase[row] = STEPPING

    def _finish(self, row: int) -> None:
        group = self.group[row]
        assert group is not None
        assert group.tokens is not None
        self._count_tokens(row)
        group.finished += 1
        group.turns += int(self.turn[row])
        oldest, newest = int(self.oldest[row]), self._newest(row)
        group.oldest = oldest if group.oldest is None else min(group.oldest, oldest)
        group.newest = newest if group.newest is None else max(group.newest, newest)
        group.tokens += self.tokens[row]
        self._free(row)
        if group.finished == group.needed:
            group.ready = True
            for other in sorted(group.rows):  # surplus members
                self.discarded += self._finished_turns(other)
                self._free(other)
        self.buffer.note(group)

    def _finished_turns(self, row: int) -> int:
        """Turns of a running episode whose environment step has ended."""
        return int(self.turn[row]) - int(self.phase[row] == STEPPING and self.turn[row] > 0)

    def _newest(self, row: int) -> int:
        version, tokens = self.buffer.version, self.tokens[row]
        for age in range(AGES):
            if tokens[(version - age) % AGES] > 0:
                return version - age
        return version

    def _free(self, row: int) -> None:
        group = self.group[row]
        if group is not None:
            group.rows.discard(row)
        self.group[row] = None
        self.phase[row] = IDLE
        self.sessions[self.engine[row]] -= 1
        self.free.append(row)

    def _count_tokens(self, rows: Ints | int) -> None:
        self.tokens[rows, self.buffer.version % AGES] += self.made[rows] * self.scale[rows]
        self.made[rows] = 0.0

    def _new_version(self) -> None:
        """New weights: later tokens are newer, and groups that are too old start again."""
        playing = np.flatnonzero(self.phase != IDLE)
        self._count_tokens(playing)
        buffer = self.buffer
        buffer.version += 1
        oldest_slot = buffer.version % AGES
        if buffer.version >= AGES:  # reused: what was there joins the next older slot
            self.tokens[:, (oldest_slot + 1) % AGES] += self.tokens[:, oldest_slot]
            self.tokens[:, oldest_slot] = 0.0
            for group in buffer.open.values():
                assert group.tokens is not None
                group.tokens[(oldest_slot + 1) % AGES] += group.tokens[oldest_slot]
                group.tokens[oldest_slot] = 0.0
        buffer.changed = True
        for group in list(buffer.open.values()):
            if self._outlived(group):
                buffer.remove(group)
                buffer.requeue(group)
                self.replayed += 1
                self.discarded += group.turns
                for row in sorted(group.rows):
                    self.discarded += self._finished_turns(row)
                    self._free(row)
        if any(group.number not in buffer.open for group, _ in self.queue):
            self.queue = deque(item for item in self.queue if item[0].number in buffer.open)

    def _outlived(self, group: _Group) -> bool:
        """As `GroupBuffer.outlived`: of running members, finished turns count."""
        buffer = self.buffer
        if buffer.config.on_stale == "mask":
            return group.ready and buffer.too_old(group.newest)
        running = [int(self.oldest[row]) for row in group.rows if self._finished_turns(row)]
        known = [version for version in (*running, group.oldest) if version is not None]
        return bool(known) and buffer.too_old(min(known))
