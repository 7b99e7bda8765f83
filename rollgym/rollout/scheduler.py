"""The scheduler: many episodes at once, each progressing independently.

Neither turns nor batches have a barrier. Each episode is an asyncio task. Whenever something changes (an
episode finishes, a group is taken or released, the run resumes), the scheduler starts as many episodes as
``max_in_flight`` allows. A finished episode is reported once, and its group decides what to do next.

The docstring of each loop and of each call that blocks says what it waits for and what unblocks it.

Invariants, each with a test that fails when it is broken:

- every started episode is reported exactly once, with a typed outcome, cancelled ones included;
- at most ``max_in_flight`` episodes run at once; a slot is free again once its episode is reported;
- every group ends exactly once: taken, dropped or filtered (a group too stale to train on is played again);
- a failed member is retried from the same start, within a budget, and its siblings are kept; members lost
  with a worker, engine, server or node have a separate, larger budget;
- the order of started groups does not depend on timing, unless ``pace_slow_groups`` is set; with order
  ``strict`` and without ``oversample`` and ``max_staleness``, neither do the taken groups;
- no token of a taken group is older than ``max_staleness``; with ``on_stale: mask``, at least one is not;
- a run without progress ends with a report of what everything waits for; after its end no call waits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any

from rollgym.core.agent import Agent
from rollgym.core.errors import RollgymError, RunError, UsageError, boundary, one_line
from rollgym.core.types import Episode, EpisodeSpec, Group
from rollgym.pool.base import EnvPool
from rollgym.rewards.scoring import Scorer
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.episode_runner import EpisodeRunner, EpisodeState
from rollgym.rollout.eval_queue import EvalQueue
from rollgym.rollout.events import EventLog
from rollgym.rollout.gc_tuning import rare_collections
from rollgym.rollout.group_buffer import GroupBuffer
from rollgym.rollout.group_state import GroupState, GroupStatus, version_range
from rollgym.rollout.inflight import InFlight
from rollgym.rollout.retry import RetryPolicy, lost_to_infrastructure
from rollgym.rollout.task_sampler import TaskSampler
from rollgym.rollout.watchdog import Stalled, waiting_report

MID_EPISODE = frozenset({EpisodeState.GENERATING, EpisodeState.STEPPING})
"""States in which a weight update would leave an episode with tokens of both versions."""


class Scheduler:
    """Runs the groups of a task sampler with one agent in one pool; ``async with`` starts and stops it.

    Args:
        sampler: The groups to run.
        pool: Where the environments run.
        agent: Plays all episodes.
        eval_agent: Plays evaluations in place of ``agent``, for instance without sampling.
        config: The settings.
        scorer: Scores every episode, evaluation included, as soon as it has ended.
        log: Receives the events.
        on_episode: Called with every finished training episode. An exception that it raises ends the run.
        first_group: The number of the first group, for a resumed run.
        paused: Whether to wait for `resume` before the first group starts.

    Example:
        >>> async with Scheduler(sampler, pool, agent, SchedulerConfig(max_in_flight=8)) as scheduler:
        ...     groups = await scheduler.take(4, release=False)
        ...     async with scheduler.updating(version=1):
        ...         ...  # train on the groups, update the engine's weights
        ...     scheduler.release(4)
    """

    def __init__(
        self,
        sampler: TaskSampler,
        pool: EnvPool,
        agent: Agent,
        config: SchedulerConfig | None = None,
        *,
        eval_agent: Agent | None = None,
        scorer: Scorer | None = None,
        log: EventLog | None = None,
        on_episode: Callable[[Episode], None] = lambda episode: None,
        first_group: int = 0,
        paused: bool = False,
    ) -> None:
        self.config = config or SchedulerConfig()
        self.buffer = GroupBuffer(sampler, self.config, first_group)
        self.outcomes: Counter[str] = Counter()
        self._pool = pool
        self._agent, self._eval_agent = agent, eval_agent or agent
        self._scorer = scorer
        self._log = log or EventLog()
        self._on_episode = on_episode
        self._in_flight = InFlight(
            self.config.max_in_flight,
            self._log,
            self._next_runner,
            self._on_finished,
            self._crashed,
            lambda spec: self.buffer.note_generating(spec.group_id, spec.episode_id),
        )
        self._queue: deque[EpisodeSpec] = deque()
        self._eval_queue = EvalQueue(RetryPolicy(max_infra_retries=self.config.groups.max_infra_retries))
        self._taking = asyncio.Lock()
        self._changed = asyncio.Event()
        self._waiting: Counter[str] = Counter()
        self._updater: asyncio.Task[Any] | None = None
        self._paused, self._draining = paused, False
        self._failure: RollgymError | None = None
        self._failed_in_a_row = 0
        self._reported_infra_retries = 0
        self.last_error = ""
        """Error message of the last episode that failed."""
        self.last_infra_error = ""
        """Error message of the last episode that was lost to infrastructure."""
        self._taken_episodes = self._taken_turns = 0
        self._outdated: set[str] = set()
        """Episodes that were cancelled because their tokens are too old, and have not ended yet."""
        self._forced_wait = 0.0
        self._reported: Counter[str] = Counter()
        self._watchdog: asyncio.Task[None] | None = None
        self._while_open = ExitStack()

    # Used by a trainer.

    async def take(self, count: int, *, release: bool = True) -> list[Group]:
        """Return the next ``count`` groups.

        Waits for: the next groups in ``order`` to be ready. Unblocked by: finished episodes, or the end of
        the run. If the call is cancelled, the next one starts with the groups it had.

        Args:
            count: Number of groups.
            release: Whether new groups may start in their place now, or only after `release`.
        """
        if count < 1 or (not release and count > self.config.ahead):
            raise UsageError(
                f"take({count}, release={release}) is not possible: take at least one group, and with "
                f"release=False at most max_ahead ({self.config.ahead})."
            )
        async with self._taking:
            self.buffer.hold_slots, self.buffer.batch = not release, count
            while self.buffer.count_chosen() < count:
                await self._choose()
            self._raise_failure()
            groups = self.buffer.pop_chosen(count)
            self._in_flight.fill()
            return groups

    def release(self, count: int) -> None:
        """Let ``count`` new groups start: the engine has the weights trained on as many taken ones."""
        self.buffer.release(count)
        self._in_flight.fill()

    async def evaluate(self, specs: Sequence[EpisodeSpec]) -> list[Episode]:
        """Run fixed episodes beside training, all under one policy version.

        They are excluded from training statistics.

        Waits for: the running update or evaluation, then its own episodes. Unblocked by: the last of them, or
        the end of the run.
        """
        self._raise_failure()
        if self._updater is asyncio.current_task():
            raise UsageError("evaluate() inside updating() would wait for itself: call it before or after.")
        with self._waits("evaluate"):
            episodes = await self._eval_queue.run(specs, self._in_flight.fill, self._in_flight.cancel)
        self._raise_failure()
        versions = {turn.policy_version for episode in episodes for turn in episode.turns}
        if len(versions) > 1:
            raise RunError(f"an evaluation ran under several policy versions: {versions}")
        return episodes

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """Update the weights inside this block; no evaluation runs meanwhile.

        Waits for: the running evaluation. Unblocked by: its last episode, or the end of the run.
        """
        async with self._eval_queue.exclusive():
            self._updater = asyncio.current_task()
            try:
                yield
            finally:
                self._updater = None
            self.buffer.version = version
            self._log.add("weights_updated", version=version)
            self._replace_outdated()
        self._in_flight.fill()

    # Control.

    async def pause(self) -> None:
        """Start no more training episodes; running ones continue, and so do evaluations."""
        self._paused = True
        self._log.add("paused")

    async def resume(self) -> None:
        """Continue after `pause` or `drain`."""
        self._paused = self._draining = False
        self._log.add("resumed")
        self._changed.set()
        self._in_flight.fill()

    async def drain(self) -> None:
        """Start no more groups and wait for the started ones. Ends a pause, so that they can finish.

        Waits for: every started episode. Unblocked by: the last of them, `resume`, or the end of the run.
        """
        self._paused, self._draining = False, True
        self._log.add("draining")
        self._in_flight.fill()
        while self._draining and (self._in_flight.running or self._queue):
            await self._wait_for_change("drain")
        self._raise_failure()

    def metrics(self) -> dict[str, Any]:
        """Numbers for a dashboard: group counts, outcomes, episodes in flight, and the length bias."""
        return {
            "groups": dict(self.buffer.counts),
            "outcomes": dict(self.outcomes),
            "in_flight": len(self._in_flight.running),
            "queued": len(self._queue),
            "ready": sum(state.status == "ready" for state in self.buffer.open.values()),
            "length_bias": self._length_bias(),
        }

    def new_infra_retries(self) -> int:
        """Episodes retried since the last call because a worker, engine, server or node was lost."""
        before, self._reported_infra_retries = (
            self._reported_infra_retries,
            self.buffer.counts["infra_retries"],
        )
        return self._reported_infra_retries - before

    def step_metrics(self) -> dict[str, float]:
        """Numbers since the last call: turns by their use, groups played again, and time spent waiting.

        ``turns_discarded`` counts turns that no batch contains: of stale groups, failed, cancelled and
        oversampled episodes. ``turns_filtered`` are those of zero-variance groups. ``forced_wait_seconds``:
        waiting for groups that the next update would have made too old, while others were ready.
        """
        turns = self.buffer.turns
        totals = Counter(
            {
                "turns_taken": turns["taken"],
                "turns_discarded": turns["stale"] + turns["lost"],
                "turns_discarded_stale": turns["stale"],
                "turns_filtered": turns["filtered"],
                "groups_replayed": self.buffer.counts["stale"],
            }
        )
        new = {name: float(totals[name] - self._reported[name]) for name in totals}
        self._reported = totals
        played = new.pop("turns_taken") + new["turns_discarded"] + new["turns_filtered"]
        new["turns_discarded_frac"] = new["turns_discarded"] / played if played else 0.0
        new["forced_wait_seconds"], self._forced_wait = self._forced_wait, 0.0
        bias = self._length_bias()
        return (
            new | self.buffer.times.metrics(self._log.now) | ({} if bias is None else {"length_bias": bias})
        )

    def waiting_for(self) -> str:
        """A report of what everything waits for."""
        notes = [f"{count} in {caller}()" for caller, count in self._waiting.items() if count]
        notes += ["paused"] * self._paused + ["draining"] * self._draining
        return waiting_report(self._in_flight, len(self._queue), self.buffer, notes, self._log.now)

    async def __aenter__(self) -> Scheduler:
        self._while_open.enter_context(rare_collections())
        self._watchdog = asyncio.create_task(self._watch())
        self._in_flight.fill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fail(RunError("The scheduler was stopped."))
        if self._watchdog is not None:
            self._watchdog.cancel()
        await self._in_flight.cancel_all()
        if self._watchdog is not None:
            await asyncio.wait([self._watchdog])
        self._while_open.close()
        self._log.flush()

    # Internals.

    def _next_runner(self) -> EpisodeRunner | None:
        spec = self._next_spec() if self._failure is None else None
        if spec is None:
            return None
        agent = self._eval_agent if self._eval_queue.holds(spec) else self._agent
        return EpisodeRunner(spec, self._pool, agent, scorer=self._scorer)

    def _next_spec(self) -> EpisodeSpec | None:
        """The next episode: of the evaluation, of a started group, or of a new group.

        A new group waits for: a free slot of ``max_ahead``. Unblocked by: `take`, `release`, or a discarded
        group.
        """
        evaluation = self._eval_queue.next(self.config.evaluation_share * self.config.max_in_flight)
        if evaluation is not None or self._paused:
            return evaluation
        while not self._queue:
            if self._draining or not self.buffer.can_start_group():
                return None
            self._queue.extend(self.buffer.start_group())
            for group_id in self.buffer.pop_deferred():
                self._log.add("group_deferred", group=group_id)
            started = self.buffer.open[self._queue[0].group_id]
            self.buffer.times.started(started.task, self._log.now)
            self._log.add("group_started", group=started.task.group_id, members=len(self._queue))
        return self._queue.popleft()

    def _on_finished(self, episode: Episode) -> None:
        """Report a finished episode, exactly once, and update its evaluation or group."""
        lost = lost_to_infrastructure(episode)
        if episode.error is not None:
            self.last_error = episode.error.message
            self.last_infra_error = self.last_error if lost else self.last_infra_error
        if self._eval_queue.holds(episode.spec):
            if self._eval_queue.finish(episode):
                self.buffer.counts["infra_retries"] += 1
                self._log.add("eval_retried", episode=episode.spec.episode_id)
        else:
            self.outcomes[episode.outcome.value] += 1
            with boundary(RunError, "on_episode raised"):
                self._on_episode(episode)
            self._update_group(episode)
        self._changed.set()
        self._in_flight.fill()

    def _update_group(self, episode: Episode) -> None:
        outdated = episode.spec.episode_id in self._outdated
        self._outdated.discard(episode.spec.episode_id)
        state = self.buffer.open.get(episode.spec.group_id)
        if state is None:
            self.buffer.turns["stale" if outdated else "lost"] += episode.length
            return
        before, members = state.status, len(state.members)
        action = state.finish(episode)
        if len(state.members) == members:
            self.buffer.turns["stale" if outdated else "lost"] += episode.length
        if action.start:
            # A retry goes first: a whole group waits for it.
            self._queue.extendleft(action.start)
            lost = action.retried == "infrastructure"
            self.buffer.counts["infra_retries" if lost else "retried"] += len(action.start)
            self._log.add(
                "episode_retried",
                group=state.task.group_id,
                episode=action.start[0].episode_id,
                infrastructure=lost,
            )
        for episode_id in action.cancel:
            self._cancel(episode_id)
        if state.status is not before:
            complete = state.status is GroupStatus.READY
            self.buffer.times.stopped(state.task.number, self._log.now, complete=complete)
            self._log.add(
                f"group_{state.status.value}", group=state.task.group_id, members=len(state.members)
            )

    def _cancel(self, episode_id: str) -> None:
        if not self._in_flight.cancel(episode_id):
            # Not started yet, so it is not reported.
            self._queue = deque(spec for spec in self._queue if spec.episode_id != episode_id)
            self._outdated.discard(episode_id)

    def _replace_outdated(self) -> None:
        """After a weight update, replace what can no longer be trained on."""
        running = self._in_flight.running
        for group_id, state in list(self.buffer.open.items()):
            runners = {name: running[name].runner for name in state.running if name in running}
            turns = itertools.chain(*(runner.turns for runner in runners.values()))
            oldest = min((v for v in (version_range(turns)[0], state.oldest) if v is not None), default=None)
            if self.buffer.outlived(state, oldest):
                self._log.add("group_cancelled", group=group_id, oldest=oldest)
                self._cancel_outdated(state)
            elif self.config.on_weight_update == "restart" and state.status is GroupStatus.OPEN:
                for name in [name for name, runner in runners.items() if runner.state in MID_EPISODE]:
                    self._restart(group_id, name)

    def _cancel_outdated(self, state: GroupState) -> None:
        self.buffer.times.stopped(state.task.number, self._log.now, complete=False)
        for name in self.buffer.cancel_group(state.task.group_id):
            self._outdated.add(name)
            self._cancel(name)

    def _restart(self, group_id: str, name: str) -> None:
        spec = self.buffer.restart(group_id, name)
        self._queue.appendleft(spec)
        self._log.add("episode_restarted", group=group_id, episode=spec.episode_id, replaces=name)
        self._outdated.add(name)
        self._cancel(name)

    async def _choose(self) -> None:
        """Choose another group for `take`, or wait for a change."""
        self._raise_failure()
        group = self.buffer.choose()
        self._log_discarded()
        self._raise_failure()
        if group is None:
            self._in_flight.fill()
            forced, began = self.buffer.must_wait(), self._log.now
            try:
                await self._wait_for_change("take")
            finally:
                self._forced_wait += forced * (self._log.now - began)
            return
        self._failed_in_a_row = 0
        self._taken_episodes += len(group.episodes)
        self._taken_turns += sum(episode.length for episode in group.episodes)
        oldest, _ = version_range(turn for episode in group.episodes for turn in episode.turns)
        self._log.add("group_taken", group=group.group_id, members=len(group.episodes), oldest=oldest)
        self._in_flight.fill()

    async def _wait_for_change(self, caller: str) -> None:
        """Wait for a change. Between the caller's check and this call there must be no ``await``.

        Waits for: `_changed`. Unblocked by: a finished episode, `resume`, or the end of the run.
        """
        self._raise_failure()
        self._changed.clear()
        with self._waits(caller):
            await self._changed.wait()

    @contextmanager
    def _waits(self, caller: str) -> Iterator[None]:
        self._waiting[caller] += 1
        try:
            yield
        finally:
            self._waiting[caller] -= 1

    def _log_discarded(self) -> None:
        for discarded in self.buffer.pop_discarded():
            self._log.add("group_discarded", group=discarded.group_id, reason=discarded.reason)
            self._failed_in_a_row = self._failed_in_a_row + 1 if discarded.reason == "dropped" else 0
            if self._failed_in_a_row >= self.config.give_up_after:
                counts = ", ".join(f"{count} x {outcome}" for outcome, count in self.outcomes.most_common(3))
                last = f" (last error: {self.last_error})" if self.last_error else ""
                self._fail(
                    RunError(f"{self._failed_in_a_row} groups in a row could not be filled: {counts}{last}")
                )

    def _fail(self, error: RollgymError) -> None:
        """End the run: every waiting and every later call raises the first error."""
        self._failure = self._failure or error
        self._eval_queue.close()
        self._changed.set()

    def _crashed(self, error: Exception) -> None:
        if not isinstance(error, RollgymError):
            crash = RunError(f"the scheduler crashed: {one_line(error)}")
            crash.__cause__ = error
            error = crash
        self._fail(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _length_bias(self) -> float | None:
        """Mean length of taken episodes over that of all due ones; below 1, short episodes are preferred.

        Overtaken groups are due, too; of running episodes, the turns so far count.
        """
        running = self._in_flight.running
        turns, episodes = self._taken_turns, self._taken_episodes
        for state in self.buffer.overtaken():
            runners = [running[name].runner for name in state.running if name in running]
            turns += sum(episode.length for episode in state.members)
            turns += sum(len(runner.turns) for runner in runners)
            episodes += len(state.members) + len(runners)
        if not self._taken_episodes or not turns:
            return None
        return (self._taken_turns / self._taken_episodes) / (turns / episodes)

    async def _watch(self) -> None:
        """End a run that makes no progress.

        Waits for: `_until_stalled`. Unblocked by: a stall, or cancellation when the scheduler stops.
        """
        try:
            await self._until_stalled()
            report = self.waiting_for()
            self._fail(Stalled(f"No progress for {self.config.stall_seconds:g} s.\n{report}"))
            self._log.add("stalled", report=report)
            await self._in_flight.cancel_all()
        except Exception as error:
            self._crashed(error)

    async def _until_stalled(self) -> None:
        """Return once a call has waited for ``stall_seconds`` without any event.

        A trainer that computes does not wait, and a paused or drained run without episodes is not stalled.
        """
        seen, quiet = (False, -1), 0
        while quiet < 4:
            await asyncio.sleep(self.config.stall_seconds / 4)
            self._log.flush()
            awaited = any(self._waiting.values())
            halted = not self._in_flight.running and (self._paused or self._draining)
            before, seen = seen, (awaited and not halted, self._log.count)
            quiet = quiet + 1 if seen[0] and seen == before else 0
