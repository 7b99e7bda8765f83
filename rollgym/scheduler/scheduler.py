"""The scheduler: many episodes at once, each on its own way, none waiting for another, none lost.

There is no turn barrier and no batch barrier. Whenever anything changes (an episode ends, a group is taken or
released), `_fill` starts as many episodes as there are places. An episode is a task that plays by itself;
when it ends it is *emitted*, and its group decides what comes of it.

Invariants, each with a test that fails when it is broken:

- every episode that is started is emitted exactly once, with a typed outcome, cancelled ones included;
- never more than ``max_in_flight`` episodes play at once; a place is free again when its episode is emitted;
- every ticket ends exactly once: taken, dropped or skipped (one that is too old to train on is played again);
- a failed member is played again from the same start, within a budget, and its siblings are kept; those that
  were lost with a worker, engine, server or node have a larger budget of their own;
- what is handed out does not depend on timing, nor, with order ``strict`` and without ``extra`` members and
  ``max_staleness``, does what is taken;
- whatever waits can say for what: a run in which nothing moves ends with a report, and a run that has ended
  lets nobody wait.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any

from rollgym.agent import Agent
from rollgym.errors import RollgymError, RunError, UsageError, boundary, one_line
from rollgym.pool import EnvPool
from rollgym.rewards.scoring import Scorer
from rollgym.scheduler.board import GroupBoard, oldest_version
from rollgym.scheduler.config import SchedulerConfig
from rollgym.scheduler.episode import EpisodeLife, EpisodeState
from rollgym.scheduler.evaluations import Evaluations
from rollgym.scheduler.events import EventLog
from rollgym.scheduler.garbage import rare_collections
from rollgym.scheduler.groups import GroupStatus, lost_with_infrastructure
from rollgym.scheduler.places import Places
from rollgym.scheduler.stream import TaskStream
from rollgym.scheduler.watchdog import Stalled, waiting_report
from rollgym.types import Episode, EpisodeSpec, Group

UNDER_WAY = frozenset({EpisodeState.GENERATING, EpisodeState.STEPPING})
"""States in which a change of the weights would leave an episode with tokens of both versions."""


class Scheduler:
    """Plays a task stream with one agent in one pool; ``async with`` starts and stops it.

    With a ``scorer`` every episode, evaluation included, is scored as soon as it has ended.
    """

    def __init__(
        self,
        stream: TaskStream,
        pool: EnvPool,
        agent: Agent,
        config: SchedulerConfig | None = None,
        *,
        scorer: Scorer | None = None,
        log: EventLog | None = None,
        on_episode: Callable[[Episode], None] = lambda episode: None,
        first_ticket: int = 0,
        paused: bool = False,
    ) -> None:
        self.config = config or SchedulerConfig()
        self.board = GroupBoard(stream, self.config, first_ticket)
        self.outcomes: Counter[str] = Counter()
        self._pool = pool
        self._agent = agent
        self._scorer = scorer
        self._log = log or EventLog()
        self._on_episode = on_episode
        self._places = Places(self.config.max_in_flight, self._log, self._emit, self._crashed)
        self._queue: deque[EpisodeSpec] = deque()
        self._evaluation = Evaluations(self.config.groups.max_infra_retries)
        self._taking = asyncio.Lock()
        self._changed = asyncio.Event()
        self._waiting: Counter[str] = Counter()
        self._updater: asyncio.Task[Any] | None = None
        self._paused, self._draining = paused, False
        self._failure: RollgymError | None = None
        self._failed_in_a_row = 0
        self._retries_told = 0
        self.last_error = ""
        """Of the last episode that failed."""
        self.last_loss = ""
        """The same, of those that were lost with their infrastructure."""
        self._taken_episodes = self._taken_turns = 0
        self._watchdog: asyncio.Task[None] | None = None
        self._while_open = ExitStack()

    # What a trainer uses.

    async def take(self, count: int, *, release: bool = True) -> list[Group]:
        """The next ``count`` groups. With ``release=False`` their places ahead stay taken until `release`.

        Where the call is cancelled, what it had is the beginning of the next one's.
        """
        if count < 1 or (not release and count > self.config.ahead):
            raise UsageError(
                f"take({count}, release={release}) cannot be met: take at least one group, and without "
                f"releasing at most max_ahead ({self.config.ahead})."
            )
        async with self._taking:
            self.board.holding = not release
            while self.board.fresh_in_hand() < count:
                await self._choose()
            self._raise_failure()
            groups = self.board.give(count)
            self._fill()
            return groups

    def release(self, count: int) -> None:
        """The weights trained on ``count`` taken groups are live: as many new ones may start."""
        self.board.release(count)
        self._fill()

    async def evaluate(self, specs: Sequence[EpisodeSpec]) -> list[Episode]:
        """Play fixed episodes beside the training ones, all under one version of the weights.

        They enter no training statistics. `updating` waits until they have ended.
        """
        self._raise_failure()
        if self._updater is asyncio.current_task():
            raise UsageError("evaluate() inside updating() would wait for itself: call it before or after.")
        with self._waits("evaluate"):
            episodes = await self._evaluation.add(specs, self._fill, self._places.cancel)
        self._raise_failure()
        versions = {turn.policy_version for episode in episodes for turn in episode.turns}
        if len(versions) > 1:
            raise RunError(f"an evaluation was played under several versions of the weights: {versions}")
        return episodes

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """Change the weights inside this block: no evaluation is under way, and none starts."""
        async with self._evaluation.gate():
            self._updater = asyncio.current_task()
            try:
                yield
            finally:
                self._updater = None
            self.board.version = version
            self._log.add("version", version=version)
            self._outdate()
        self._fill()

    # Control.

    async def pause(self) -> None:
        """Start no more training episodes; those under way go on, and evaluations are still played."""
        self._paused = True
        self._log.add("paused")

    async def resume(self) -> None:
        """Go on after `pause` or `drain`."""
        self._paused = self._draining = False
        self._log.add("resumed")
        self._changed.set()
        self._fill()

    async def drain(self) -> None:
        """Start no more groups, and wait until those under way are finished (or somebody calls `resume`).

        What has begun is finished, so this ends a pause.
        """
        self._paused, self._draining = False, True
        self._log.add("draining")
        self._fill()
        while self._draining and (self._places.lives or self._queue):
            await self._change("drain")
        self._raise_failure()

    def metrics(self) -> dict[str, Any]:
        """Numbers for a dashboard: counts, outcomes, places in use, and how far lengths are biased."""
        return {
            "groups": dict(self.board.counts),
            "outcomes": dict(self.outcomes),
            "in_flight": len(self._places.lives),
            "queued": len(self._queue),
            "ready": sum(state.status == "ready" for state in self.board.open.values()),
            "length_bias": self._length_bias(),
        }

    def new_infra_retries(self) -> int:
        """Episodes played again since the last call because a worker, engine, server or node was lost."""
        before, self._retries_told = self._retries_told, self.board.counts["infra_retries"]
        return self._retries_told - before

    def waiting_for(self) -> str:
        """What everything waits for, in words."""
        notes = [f"{count} in {caller}()" for caller, count in self._waiting.items() if count]
        notes += ["paused"] * self._paused + ["draining"] * self._draining
        return waiting_report(self._places, len(self._queue), self.board, notes, self._log.now)

    async def __aenter__(self) -> Scheduler:
        self._while_open.enter_context(rare_collections())
        self._watchdog = asyncio.create_task(self._watch())
        self._fill()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fail(RunError("The scheduler was stopped."))
        if self._watchdog is not None:
            self._watchdog.cancel()
        await self._places.cancel_all()
        if self._watchdog is not None:
            await asyncio.wait([self._watchdog])
        self._while_open.close()
        self._log.flush()

    # The machine.

    def _fill(self) -> None:
        """Start as many episodes as there are places for."""
        try:
            while self._failure is None and self._places.free:
                spec = self._next_spec()
                if spec is None:
                    return
                self._places.start(EpisodeLife(spec, self._pool, self._agent, scorer=self._scorer))
        except Exception as error:
            self._crashed(error)

    def _next_spec(self) -> EpisodeSpec | None:
        evaluation = self._evaluation.next(self.config.evaluation_share * self.config.max_in_flight)
        if evaluation is not None or self._paused:
            return evaluation
        while not self._queue:
            if self._draining or not self.board.may_hand_out():
                return None
            self._queue.extend(self.board.hand_out())
            self._log.add("handed_out", group=self._queue[0].group_id, members=len(self._queue))
        return self._queue.popleft()

    def _emit(self, episode: Episode) -> None:
        """An episode has ended: tell everybody, exactly once, and see what its group makes of it."""
        spec = episode.spec
        self._log.add("emitted", episode=spec.episode_id, group=spec.group_id, outcome=episode.outcome.value)
        lost = lost_with_infrastructure(episode)
        if episode.error is not None:
            self.last_error = episode.error.message
            self.last_loss = self.last_error if lost else self.last_loss
        if self._evaluation.holds(episode):
            if lost and self._evaluation.again(episode):
                self.board.counts["infra_retries"] += 1
                self._log.add("retried", episode=spec.episode_id)
            else:
                self._evaluation.finish(episode)
        else:
            self.outcomes[episode.outcome.value] += 1
            with boundary(RunError, "on_episode raised"):
                self._on_episode(episode)
            self._settle(episode)
        self._changed.set()
        self._fill()

    def _settle(self, episode: Episode) -> None:
        state = self.board.open.get(int(episode.spec.group_id[1:]))
        if state is None:
            return
        before = state.status
        verdict = state.finish(episode)
        if verdict.start:
            # A refill goes first: a whole group waits for it.
            self._queue.extendleft(verdict.start)
            lost = verdict.infrastructure
            self.board.counts["infra_retries" if lost else "refilled"] += len(verdict.start)
            self._log.add(
                "refilled",
                group=state.ticket.group_id,
                episode=verdict.start[0].episode_id,
                infrastructure=lost,
            )
        for episode_id in verdict.cancel:
            self._cancel(episode_id)
        if state.status is not before:
            self._log.add(state.status.value, group=state.ticket.group_id, members=len(state.members))

    def _cancel(self, episode_id: str) -> None:
        if not self._places.cancel(episode_id):
            # Not started yet: it was never handed to anybody, so nothing is owed for it.
            self._queue = deque(spec for spec in self._queue if spec.episode_id != episode_id)

    def _outdate(self) -> None:
        """The weights have changed: what can no longer be trained on begins again at once."""
        for number, state in list(self.board.open.items()):
            playing = {
                name: self._places.lives[name].life.turns
                for name in state.running
                if name in self._places.lives
            }
            played = itertools.chain(*playing.values(), *(episode.turns for episode in state.members))
            oldest = oldest_version(played)
            if self.board.too_old(oldest):
                self._log.add("recalled", group=state.ticket.group_id, oldest=oldest)
                for name in self.board.recall(number):
                    self._cancel(name)
            elif self.config.under_way == "restart" and state.status is GroupStatus.OPEN:
                for name in [name for name in playing if self._places.lives[name].life.state in UNDER_WAY]:
                    self._restart(number, name)

    def _restart(self, number: int, name: str) -> None:
        spec = self.board.restart(number, name)
        self._queue.appendleft(spec)
        self._log.add("restarted", group=spec.group_id, episode=spec.episode_id, instead=name)
        self._cancel(name)

    async def _choose(self) -> None:
        """Choose another group for whoever takes, or wait until something changes."""
        self._raise_failure()
        group = self.board.choose()
        self._note_passed()
        self._raise_failure()
        if group is None:
            self._fill()
            await self._change("take")
            return
        self._failed_in_a_row = 0
        self._taken_episodes += len(group.episodes)
        self._taken_turns += sum(episode.length for episode in group.episodes)
        oldest = oldest_version(turn for episode in group.episodes for turn in episode.turns)
        self._log.add("taken", group=group.group_id, members=len(group.episodes), oldest=oldest)
        self._fill()

    async def _change(self, caller: str) -> None:
        """Wait until anything changes. Between the look at what is and this there must be no ``await``."""
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

    def _note_passed(self) -> None:
        for passed in self.board.passed_over():
            self._log.add(passed.why + "_over", group=passed.group_id)
            self._failed_in_a_row = self._failed_in_a_row + 1 if passed.why == "dropped" else 0
            if self._failed_in_a_row >= self.config.give_up_after:
                why = ", ".join(f"{count} x {outcome}" for outcome, count in self.outcomes.most_common(3))
                last = f" (the last error: {self.last_error})" if self.last_error else ""
                self._fail(
                    RunError(f"{self._failed_in_a_row} groups in a row could not be filled: {why}{last}")
                )

    def _fail(self, error: RollgymError) -> None:
        """The run is over: whoever waits is told, now and later."""
        self._failure = self._failure or error
        self._evaluation.fail_waiting()
        self._changed.set()

    def _crashed(self, error: Exception) -> None:
        if not isinstance(error, RollgymError):
            broke = RunError(f"the scheduler broke: {one_line(error)}")
            broke.__cause__ = error
            error = broke
        self._fail(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _length_bias(self) -> float | None:
        """Mean length of taken episodes over that of all that were due: below 1, short ones are preferred.

        Due are also those that later ones were taken before; of what still plays, the turns so far count.
        """
        turns, episodes = self._taken_turns, self._taken_episodes
        for state in self.board.overtaken():
            lives = [self._places.lives[name].life for name in state.running if name in self._places.lives]
            turns += sum(episode.length for episode in state.members) + sum(len(life.turns) for life in lives)
            episodes += len(state.members) + len(lives)
        if not self._taken_episodes or not turns:
            return None
        return (self._taken_turns / self._taken_episodes) / (turns / episodes)

    async def _watch(self) -> None:
        try:
            await self._until_stalled()
            report = self.waiting_for()
            self._fail(Stalled(f"Nothing has moved for {self.config.stall_seconds:g} s.\n{report}"))
            self._log.add("stalled", report=report)
            await self._places.cancel_all()
        except Exception as error:
            self._crashed(error)

    async def _until_stalled(self) -> None:
        """Return when somebody has waited for so long while nothing moved. A busy trainer is no stall."""
        seen, quiet = (False, -1), 0
        while quiet < 4:
            await asyncio.sleep(self.config.stall_seconds / 4)
            self._log.flush()
            awaited = any(self._waiting.values())
            halted = not self._places.lives and (self._paused or self._draining)
            before, seen = seen, (awaited and not halted, self._log.count)
            quiet = quiet + 1 if seen[0] and seen == before else 0
