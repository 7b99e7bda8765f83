"""The event level: the real scheduler, group buffer and episode runner, with every turn, in virtual time.

Only what would compute is replaced: engines and environments wait instead, and so does the learner. The order
of a step is that of `rollgym.trainer.loop`.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollgym.core.agent import AgentAction, Briefing
from rollgym.core.errors import EngineLost, WorkerLost
from rollgym.core.types import Episode, EpisodeSpec, Group, Limits
from rollgym.pool.base import EnvSession, Reset, Step
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.events import EventLog
from rollgym.rollout.scheduler import Scheduler
from rollgym.rollout.task_sampler import EnvSource, TaskSampler
from rollgym.simulation.latencies import GroupPlan
from rollgym.simulation.samples import StepSample
from rollgym.simulation.scenario import EngineModel, Scenario
from rollgym.simulation.virtual_time import run_virtual

OnStep = Callable[[int], object]
FOREVER = 1e12
"""Seconds after which a simulated run would count as stalled: never."""
MAX_TOKENS = 4096
"""Longest reply whose token ids a simulated turn carries; longer ones are scaled."""


@dataclass(slots=True)
class EventRun:
    """The result of a simulation at the event level."""

    steps: list[StepSample] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    """All groups trained on, if asked for."""
    counts: Counter[str] = field(default_factory=Counter)
    """The buffer's counts of groups."""
    turns: int = 0
    """All turns played."""


def simulate_events(
    scenario: Scenario, steps: int, *, keep_groups: bool = False, on_step: OnStep = lambda step: None
) -> EventRun:
    """Simulate training steps with the real scheduler.

    Args:
        scenario: The run.
        steps: Training steps.
        keep_groups: Return the groups that were trained on.
        on_step: Called after each step, with its number.
    """
    world = _World(scenario, keep_groups, on_step)
    return run_virtual(lambda: world.train(steps))


class _Gauge:
    """A number over time, and its integral."""

    def __init__(self) -> None:
        self.value = 0.0
        self.total = 0.0
        self._at = 0.0

    def add(self, change: float, now: float) -> None:
        self.total += self.value * (now - self._at)
        self.value, self._at = self.value + change, now

    def integral(self, now: float) -> float:
        self.add(0.0, now)
        return self.total


class SimulatedEngine:
    """An engine whose requests share its speed equally, computed exactly.

    All running requests gain the same work per second, so that a request ends when the work done per request
    since its start is its own work: one heap and one timer suffice.
    """

    def __init__(self, model: EngineModel, busy: _Gauge) -> None:
        self.model = model
        self.requests = 0
        self.sessions: set[str] = set()
        self.lost = False
        self._busy = busy
        self._done = 0.0
        self._updated = 0.0
        self._asleep = 0
        self._running: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._was_busy = False
        self._versions: list[tuple[float, int]] = [(0.0, 0)]
        """Work done per request at each weight update."""

    @property
    def asleep(self) -> bool:
        """Whether it generates nothing for now."""
        return self._asleep > 0

    async def generate(self, work: float) -> list[tuple[int, float]]:
        """Take as long as the work needs; returns the work done under each version."""
        if self.lost:
            raise EngineLost("the simulated engine died")
        self._advance()
        begin, end = self._done, self._done + work
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number += 1
        heapq.heappush(self._running, (end, self._number, done))
        self._schedule()
        try:
            await done
        except asyncio.CancelledError:
            self._advance()
            self._running = [one for one in self._running if one[2] is not done]
            heapq.heapify(self._running)
            self._schedule()
            raise
        return self._spans(begin, end)

    def pause(self) -> None:
        """Generate nothing until `resume`; calls nest."""
        self._advance()
        self._asleep += 1
        self._schedule()

    def resume(self) -> None:
        """End one `pause`."""
        self._advance()
        self._asleep -= 1
        self._schedule()

    def set_version(self, version: int) -> None:
        """Generate with new weights from now on."""
        self._advance()
        self._versions.append((self._done, version))

    def die(self) -> None:
        """Fail all requests, and those to come until `revive`."""
        self._advance()
        self.lost = True
        for _, _, done in self._running:
            if not done.done():
                done.set_exception(EngineLost("the simulated engine died"))
        self._running.clear()
        self.sessions.clear()
        self._schedule()

    def revive(self) -> None:
        """Serve requests again."""
        self.lost = False

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._running and not self._asleep:
            self._done += (now - self._updated) / self.model.seconds_per_unit(len(self._running))
        self._updated = now

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        busy = bool(self._running) and not self._asleep
        if busy != self._was_busy:
            self._was_busy = busy
            self._busy.add(1.0 if busy else -1.0, loop.time())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if busy:
            left = self._running[0][0] - self._done
            seconds = max(0.0, left * self.model.seconds_per_unit(len(self._running)))
            self._timer = loop.call_later(seconds, self._finish)

    def _finish(self) -> None:
        self._timer = None
        self._advance()
        # Tolerance: rounding may leave the first request a hair short.
        limit = max(self._done, self._running[0][0]) + 1e-9 if self._running else 0.0
        while self._running and self._running[0][0] <= limit:
            _, _, done = heapq.heappop(self._running)
            if not done.done():
                done.set_result(None)
        self._schedule()

    def _spans(self, begin: float, end: float) -> list[tuple[int, float]]:
        spans = []
        for number in range(len(self._versions) - 1, -1, -1):
            at, version = self._versions[number]
            if at < end or not number:
                spans.append((version, end - max(at, begin)))
                end = max(at, begin)
            if at <= begin:
                break
        return spans[::-1]


class _World:
    """The trainer, and what the scheduler sees as pool and as agent."""

    def __init__(self, scenario: Scenario, keep_groups: bool, on_step: OnStep) -> None:
        self.scenario = scenario
        self.version = 0
        self.result = EventRun()
        self._keep, self._on_step = keep_groups, on_step
        self.generating, self.stepping, self.busy = _Gauge(), _Gauge(), _Gauge()
        self.in_flight, self.progress = _Gauge(), _Gauge()
        self.engines = [SimulatedEngine(scenario.engine, self.busy) for _ in range(scenario.engine.engines)]
        self._engine_of: dict[str, SimulatedEngine] = {}
        self._plans: dict[str, GroupPlan] = {}
        self._rng = np.random.default_rng((scenario.seed, 3))
        self._env_calls: defaultdict[int, set[asyncio.Future[None]]] = defaultdict(set)
        self.turns = 0

    # The trainer.

    async def train(self, steps: int) -> EventRun:
        """Train; the order of a step is that of `TrainLoop.train_step`."""
        loop, scenario = asyncio.get_running_loop(), self.scenario
        log = EventLog(clock=loop.time)
        killers = [asyncio.create_task(kill) for kill in self._killers()]
        scheduler = Scheduler(
            TaskSampler([EnvSource(env_id="simulated", limits=Limits())], seed=scenario.seed),
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self._config(),
            log=log,
            on_episode=self._count,
        )
        async with scheduler:
            for step in range(steps):
                began, counted = loop.time(), self._measured(loop.time())
                groups = await scheduler.take(scenario.batch, release=False)
                wait, waiting = loop.time() - began, self._measured(loop.time())
                for engine in self._lent():
                    engine.pause()
                train, sync = scenario.train_seconds(step), scenario.sync_seconds(step)
                await asyncio.sleep(train)
                async with scheduler.updating(self.version + 1):
                    for engine in self.engines:
                        engine.pause()
                    await asyncio.sleep(sync)
                    self.version += 1
                    for engine in self.engines:
                        engine.set_version(self.version)
                        engine.resume()
                    for engine in self._lent():
                        engine.resume()
                scheduler.release(len(groups))
                self._record(scheduler, groups, wait, (train, sync), counted, waiting, loop.time() - began)
                self._on_step(step)
            self.result.counts = Counter(scheduler.buffer.counts)
        for killer in killers:
            killer.cancel()
        await asyncio.gather(*killers, return_exceptions=True)
        self.result.turns = self.turns
        return self.result

    def _config(self) -> SchedulerConfig:
        scenario = self.scenario
        return replace(
            scenario.scheduler,
            stall_seconds=FOREVER,
            filter_zero_variance=bool(scenario.filtered) and scenario.scheduler.filter_zero_variance,
            zero_variance=lambda group: scenario.is_filtered(int(group.group_id[1:])),
        )

    def _lent(self) -> list[SimulatedEngine]:
        return self.engines[: self.scenario.engine.lent]

    def _count(self, episode: Episode) -> None:
        self.turns += episode.length

    def _measured(self, now: float) -> list[float]:
        gauges = (self.generating, self.stepping, self.busy, self.in_flight, self.progress)
        return [gauge.integral(now) for gauge in gauges]

    def _record(
        self,
        scheduler: Scheduler,
        groups: Sequence[Group],
        wait: float,
        learner: tuple[float, float],
        before: Sequence[float],
        waiting: Sequence[float],
        seconds: float,
    ) -> None:
        metrics = scheduler.step_metrics()
        generating, stepping = waiting[0] - before[0], waiting[1] - before[1]
        share = generating / (generating + stepping) if generating + stepping else 0.0
        now = self._measured(asyncio.get_running_loop().time())
        generated, _, busy, in_flight, progress = (b - a for a, b in zip(before, now, strict=True))
        version, scenario = self.version - 1, self.scenario
        tokens = token_ages(groups, version)
        in_mask = scenario.scheduler.on_stale == "mask"
        self.result.steps.append(
            StepSample(
                wait=wait,
                wait_generate=wait * share,
                wait_environment=wait * (1 - share),
                forced=metrics["forced_wait_seconds"],
                train=learner[0],
                sync=learner[1],
                turns=sum(episode.length for group in groups for episode in group.episodes),
                discarded=int(metrics["turns_discarded"]),
                filtered=int(metrics["turns_filtered"]),
                tokens=tokens,
                masked=sum(n for age, n in tokens.items() if age > scenario.bound) if in_mask else 0.0,
                slow=sum(self.plan(group.group_id).slow for group in groups),
                replayed=int(metrics["groups_replayed"]),
                generating=generated / seconds if seconds else 0.0,
                in_flight=in_flight / seconds if seconds else 0.0,
                engine_busy=busy / seconds / len(self.engines) if seconds else 0.0,
                progress=progress / in_flight if in_flight else 0.0,
            )
        )
        if self._keep:
            self.result.groups += groups
        for group in groups:
            self._plans.pop(group.group_id, None)

    # Failures.

    def _killers(self) -> list[Any]:
        failures = self.scenario.failures
        kinds = [(failures.engine, self._kill_engine), (failures.env, self._kill_env_actor)]
        return [self._kill_often(mean, kill) for mean, kill in kinds if mean is not None]

    async def _kill_often(self, mean: float, kill: Callable[[], object]) -> None:
        while True:
            await asyncio.sleep(float(self._rng.exponential(mean)))
            kill()

    def _kill_engine(self) -> None:
        alive = [engine for engine in self.engines if not engine.lost]
        if len(alive) > 1:  # the router waits for the last one; this model does not
            engine = alive[int(self._rng.integers(len(alive)))]
            engine.die()
            asyncio.get_running_loop().call_later(self.scenario.failures.engine_back, engine.revive)

    def _kill_env_actor(self) -> None:
        actor = int(self._rng.integers(self.scenario.nodes.env_actors))
        for call in list(self._env_calls[actor]):
            if not call.done():
                call.set_exception(WorkerLost("the simulated environment actor died"))

    # The pool and the agent.

    def plan(self, group_id: str) -> GroupPlan:
        """The durations of a group."""
        if group_id not in self._plans:
            number = int(group_id[1:])
            scenario = self.scenario
            self._plans[group_id] = scenario.latencies.group(scenario.seed, number, scenario.members)
        return self._plans[group_id]

    async def open(self, spec: EpisodeSpec) -> EnvSession:
        """Lease an environment."""
        self.in_flight.add(1.0, asyncio.get_running_loop().time())
        return _Session(self, spec)

    def player(self, briefing: Briefing) -> _Player:
        """The policy in one episode."""
        return _Player(self, briefing.spec)

    async def environment(self, actor: int, seconds: float) -> None:
        """Wait for an environment on this actor."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(seconds, _end, done)
        self._env_calls[actor].add(done)
        self.stepping.add(1.0, loop.time())
        try:
            await done
        finally:
            timer.cancel()
            self._env_calls[actor].discard(done)
            self.stepping.add(-1.0, loop.time())

    async def reply(self, session: str, work: float) -> list[tuple[int, float]]:
        """Generate on the engine of the session, which is chosen as in `RoutedEngine`."""
        engine = self._route(session)
        loop = asyncio.get_running_loop()
        engine.requests += 1
        self.generating.add(1.0, loop.time())
        try:
            return await engine.generate(work)
        finally:
            engine.requests -= 1
            self.generating.add(-1.0, loop.time())

    def forget(self, session: str) -> None:
        """End a session."""
        engine = self._engine_of.pop(session, None)
        if engine is not None:
            engine.sessions.discard(session)

    def _route(self, session: str) -> SimulatedEngine:
        known = self._engine_of.get(session)
        awake = [engine for engine in self.engines if not engine.lost and not engine.asleep]
        if known is not None and not known.lost and (not known.asleep or not awake):
            return known
        alive = awake or [engine for engine in self.engines if not engine.lost]
        engine = min(alive, key=lambda one: (one.requests, len(one.sessions)))
        self.forget(session)
        self._engine_of[session] = engine
        engine.sessions.add(session)
        return engine


class _Session(EnvSession):
    def __init__(self, world: _World, spec: EpisodeSpec) -> None:
        self._world, self._member = world, spec.member
        self._plan = world.plan(spec.group_id)
        self._turn = 0
        self._actor = spec.sampling_seed % world.scenario.nodes.env_actors

    async def reset(self) -> Reset:
        await self._world.environment(self._actor, float(self._plan.start[self._member]))
        return Reset(observation="")

    async def step(self, action: str) -> Step:
        await self._world.environment(self._actor, float(self._plan.step[self._member, self._turn]))
        self._turn += 1
        self._world.progress.add(1.0, asyncio.get_running_loop().time())
        over = self._turn >= int(self._plan.turns[self._member])
        return Step(observation="", reward=0.0, terminated=over, truncated=False)

    async def close(self) -> None:
        now = asyncio.get_running_loop().time()
        self._world.in_flight.add(-1.0, now)
        self._world.progress.add(-self._turn, now)


class _Player:
    def __init__(self, world: _World, spec: EpisodeSpec) -> None:
        self._world, self._spec = world, spec
        self._plan = world.plan(spec.group_id)
        self._turn = 0

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction:
        member, turn = self._spec.member, self._turn
        spans = await self._world.reply(self._spec.episode_id, float(self._plan.work[member, turn]))
        self._turn += 1
        tokens = min(MAX_TOKENS, max(1, round(float(self._plan.tokens[member, turn]))))
        counts = _whole([work for _, work in spans], tokens)
        versions = tuple((version, n) for (version, _), n in zip(spans, counts, strict=True) if n)
        return AgentAction(
            action="",
            action_ids=(0,) * tokens,
            version_spans=versions,
            policy_version=min(version for version, _ in versions),
        )

    async def leave(self) -> None:
        self._world.forget(self._spec.episode_id)


def _end(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _whole(parts: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to the parts, with this sum."""
    whole = sum(parts)
    if whole <= 0:
        return [0] * (len(parts) - 1) + [total]
    ends = np.rint(np.cumsum(parts) / whole * total).astype(int)
    return [int(n) for n in np.diff(ends, prepend=0)]


def token_ages(groups: Sequence[Group], version: int) -> dict[int, float]:
    """Tokens of groups by their age when the weights have this version."""
    ages: Counter[int] = Counter()
    for group in groups:
        for episode in group.episodes:
            for turn in episode.turns:
                for sampled_by, count in turn.version_spans:
                    ages[version - sampled_by] += count
    return {age: float(count) for age, count in sorted(ages.items())}
