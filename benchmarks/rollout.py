"""How long an engine stands idle: 128 episodes in flight, heavy-tailed environments, one slow one.

    python benchmarks/rollout.py [--quick] [--batches 24] [--rounds 2] [--scale 1]

The engine and the environments are simulated (they sleep); the scheduler, asyncio and the time are real. The
engine has 16 slots and takes 32 ms for a reply; a step takes a log-normal time (median 50 ms, mean 109 ms,
one in a hundred above 0.9 s); episodes have 2 to 6 turns, groups 8 members, batches 16 groups. A trainer
takes the batches as they come and needs no time itself. In the same run:

- rollgym, taking the earliest groups that are ready, and (``strict``) in the order they were handed out;
- a batch barrier: 128 episodes go their own ways, the next 128 start when all of them have ended;
- a turn barrier: all 128 environments step together; one whose episode ended starts another at once;
- the lower bound for each: the time the engine was busy, over its slots.

Each is measured with all environments alike, and with one of the 128 that takes 2 s for every step, forty
times the median. Ours is measured in steady state, from the end of the warm-up batches to the last batch,
while episodes go on being started: neither the start nor the tail of a run is in it. Barriers have both in
every batch; that is their price. At last the plain case: episodes of one step of 0.1 s, an engine that needs
no time, and one environment of 128 that takes 4 s. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from rollgym.core.agent import AgentAction, Briefing
from rollgym.core.types import EpisodeSpec
from rollgym.pool.base import EnvSession, Reset, Step
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.episode_runner import run_episode
from rollgym.rollout.group_state import GroupPolicy
from rollgym.rollout.scheduler import Scheduler
from rollgym.rollout.task_sampler import EnvSource, TaskSampler

IN_FLIGHT = 128
GROUP = 8
SLOWER = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is simulated."""

    slots: int = 16
    reply_seconds: float = 0.032
    step_median: float = 0.05
    sigma: float = 1.25
    turns: tuple[int, ...] = (2, 3, 3, 4, 4, 5, 5, 6)
    """Turns of a group's members in a fixed order: every batch has equally many turns."""
    slow: bool = False

    def scaled(self, scale: float) -> World:
        """The same world in another time."""
        return replace(self, reply_seconds=self.reply_seconds * scale, step_median=self.step_median * scale)


class SimulatedEngine:
    """A server with some slots, the same time for each reply, first come first served; and its agent.

    It keeps its own time, as a server elsewhere would: a reply that waits in the queue begins when a slot is
    free, not when this process notices.
    """

    def __init__(self, world: World) -> None:
        self._seconds = world.reply_seconds
        self._free_at = [0.0] * world.slots
        self._replies = 0

    def player(self, briefing: Briefing) -> SimulatedEngine:
        """One player serves all."""
        return self

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction:
        """Wait for a slot, then for the reply."""
        now = asyncio.get_running_loop().time()
        end = max(now, self._free_at[0]) + self._seconds
        heapq.heapreplace(self._free_at, end)
        self._replies += 1
        await asyncio.sleep(end - now)
        return AgentAction(action="go", policy_version=0)

    def busy(self, now: float) -> float:
        """For how long the engine has been busy, all slots taken together, over their number."""
        to_come = sum(max(0.0, free_at - now) for free_at in self._free_at)
        return (self._replies * self._seconds - to_come) / len(self._free_at)

    async def close(self) -> None:
        """There is nothing to close."""


class SimulatedPool:
    """128 environments; where the world has a slow one, it is number 0, for good."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.free = list(range(IN_FLIGHT))

    async def open(self, spec: EpisodeSpec) -> SimulatedSession:
        """The free environment with the lowest number."""
        return SimulatedSession(self, heapq.heappop(self.free), spec)

    async def close(self) -> None:
        """There is nothing to close."""


class SimulatedSession(EnvSession):
    """One episode; how many turns it has and how long they take depends on its seeds and its environment."""

    def __init__(self, pool: SimulatedPool, number: int, spec: EpisodeSpec) -> None:
        self._pool, self._number, self._world = pool, number, pool.world
        self._rng = random.Random(spec.sampling_seed)
        turns = self._world.turns
        self._left = turns[(spec.env_seed + spec.member) % len(turns)]

    async def reset(self) -> Reset:
        """Begin; this takes no time."""
        return Reset(observation="start")

    async def step(self, action: str) -> Step:
        """Take the time that it takes."""
        await asyncio.sleep(self._seconds())
        self._left -= 1
        return Step(observation="next", reward=0.0, terminated=self._left == 0, truncated=False)

    async def close(self) -> None:
        """Free the environment for the next episode."""
        heapq.heappush(self._pool.free, self._number)

    def _seconds(self) -> float:
        if self._world.slow and self._number == 0:
            return self._world.step_median * SLOWER
        return self._rng.lognormvariate(math.log(self._world.step_median), self._world.sigma)


class Run:
    """Completion time of each batch and engine busy time until then."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._times: list[float] = []
        self._busy: list[float] = []
        self.mark()

    def mark(self) -> None:
        """A batch is complete, or the first one begins."""
        now = asyncio.get_running_loop().time()
        self._times.append(now)
        self._busy.append(self._engine.busy(now))

    @property
    def batches(self) -> int:
        """Number of complete batches."""
        return len(self._times) - 1

    def intervals(self, warm_up: int) -> list[float]:
        """The times between batches after the warm-up."""
        return [later - earlier for earlier, later in itertools.pairwise(self._times[warm_up:])]

    def to_bound(self, warm_up: int) -> float:
        """The time after the warm-up over the time in which the engine was busy."""
        busy = self._busy[-1] - self._busy[warm_up]
        return (self._times[-1] - self._times[warm_up]) / busy if busy else math.nan


async def scheduled(world: World, batches: int, order: Literal["ready", "strict"] = "ready") -> Run:
    """Ours."""
    config = SchedulerConfig(max_in_flight=IN_FLIGHT, groups=GroupPolicy(size=GROUP), order=order)
    engine = SimulatedEngine(world)
    run = Run(engine)
    async with Scheduler(_stream(), SimulatedPool(world), engine, config) as scheduler:
        for _ in range(batches):
            await scheduler.take(IN_FLIGHT // GROUP)
            run.mark()
    return run


async def batch_barrier(world: World, batches: int) -> Run:
    """Episodes go their own ways; the next batch starts when the last of them has ended."""
    pool, engine, specs = SimulatedPool(world), SimulatedEngine(world), _specs()
    run = Run(engine)
    for _ in range(batches):
        batch = itertools.islice(specs, IN_FLIGHT)
        await asyncio.gather(*(run_episode(spec, pool, engine) for spec in batch))
        run.mark()
    return run


async def turn_barrier(world: World, batches: int) -> Run:
    """Every environment waits each turn for the slowest; one whose episode ended starts another at once."""
    pool, engine, specs = SimulatedPool(world), SimulatedEngine(world), _specs()
    lanes = [await pool.open(next(specs)) for _ in range(IN_FLIGHT)]
    run = Run(engine)
    ended = 0
    while run.batches < batches:
        await asyncio.gather(*(engine.act("", {}) for _ in lanes))
        steps = await asyncio.gather(*(lane.step("go") for lane in lanes))
        over = [number for number, step in enumerate(steps) if step.terminated]
        for number in over:
            await lanes[number].close()
        for number in over:
            lanes[number] = await pool.open(next(specs))
        ended += len(over)
        if ended >= IN_FLIGHT * (run.batches + 1):
            run.mark()
    return run


def _stream() -> TaskSampler:
    return TaskSampler([EnvSource(env_id="simulated")])


def _specs() -> Iterator[EpisodeSpec]:
    """The episodes that the scheduler plays, in the order in which it hands them out."""
    stream = _stream()
    for number in itertools.count():
        yield from (stream.spec(stream.group_task(number), member, 0, 0) for member in range(GROUP))


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A contender and its number of batches: with equal environments and with one slow one."""

    play: Callable[[World, int], Coroutine[Any, Any, Run]]
    batches: tuple[int, int]
    warm_up: int = 0
    rounds: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Seconds per batch of a contender: equal environments, and one slow one."""

    to_bound: tuple[float, float]
    interval: tuple[float, float]

    @property
    def shift(self) -> float:
        """By how much the slow one moved the median time between batches, as a share."""
        return self.interval[1] / self.interval[0] - 1


def measure(contender: Contender, world: World) -> Figures:
    """The medians; the two worlds take turns."""
    worlds = (world, replace(world, slow=True))
    runs: tuple[list[Run], list[Run]] = ([], [])
    for _ in range(contender.rounds):
        for place in (0, 1):
            batches = contender.warm_up + contender.batches[place]
            runs[place].append(asyncio.run(contender.play(worlds[place], batches)))
    ratios = [statistics.median(run.to_bound(contender.warm_up) for run in some) for some in runs]
    intervals = [
        statistics.median(itertools.chain.from_iterable(run.intervals(contender.warm_up) for run in some))
        for some in runs
    ]
    return Figures(to_bound=(ratios[0], ratios[1]), interval=(intervals[0], intervals[1]))


def heavy_tails(args: argparse.Namespace) -> dict[str, Figures]:
    """The engine is the bottleneck; steps have heavy tails."""
    world = World(step_median=args.step_median).scaled(args.scale)
    few = (args.barrier_batches, args.barrier_batches // 2)
    ours = {"batches": (args.batches, args.batches), "warm_up": 4, "rounds": args.rounds}
    contenders = {
        "rollgym": Contender(play=scheduled, **ours),
        "rollgym, strict order": Contender(play=partial(scheduled, order="strict"), **{**ours, "rounds": 1}),
        "batch barrier": Contender(play=batch_barrier, batches=few),
        "turn barrier": Contender(play=turn_barrier, batches=few),
    }
    if args.quick:
        del contenders["rollgym, strict order"]
    print(f"{IN_FLIGHT} episodes in flight, {_words(world)}\n")
    return _table({name: measure(contender, world) for name, contender in contenders.items()})


def one_step(args: argparse.Namespace) -> dict[str, Figures]:
    """Episodes of one step, all alike, and an engine that needs no time: only the slow one can matter."""
    world = World(slots=1, reply_seconds=0.0, step_median=0.1, sigma=0.0, turns=(1,))
    world = world.scaled(max(args.scale, 0.5))
    contenders = {
        "rollgym": Contender(play=scheduled, batches=(2 * args.batches, 2 * args.batches), warm_up=4),
        "batch barrier": Contender(play=batch_barrier, batches=(args.batches, args.barrier_batches // 2)),
    }
    print(f"\nepisodes of one step, {_words(world)}\n")
    return _table({name: measure(contender, world) for name, contender in contenders.items()})


def _words(world: World) -> str:
    return (
        f"{world.slots} engine slots, {1000 * world.reply_seconds:g} ms for a reply, median of "
        f"{1000 * world.step_median:g} ms for a step"
    )


def _table(rows: dict[str, Figures]) -> dict[str, Figures]:
    print(f"{'':24}{'all environments alike':>24}{'one slow environment':>24}")
    print(f"{'':24}{'x bound':>12}{'s/batch':>12}{'x bound':>12}{'s/batch':>12}{'shift':>10}")
    for name, row in rows.items():
        alike, slow = zip(map(_ratio, row.to_bound), row.interval, strict=True)
        print(f"{name:24}{alike[0]:>12}{alike[1]:12.3f}{slow[0]:>12}{slow[1]:12.3f}{row.shift:+10.1%}")
    return rows


def _ratio(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=int, default=24, help="batches of ours in each round")
    parser.add_argument("--barrier-batches", type=int, default=6, help="batches behind barriers")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--step-median", type=float, default=World().step_median, help="seconds of a step")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies every simulated time")
    parser.add_argument("--quick", action="store_true", help="one round, few batches, all times a fifth")
    args = parser.parse_args()
    if args.quick:
        args.batches, args.barrier_batches, args.rounds, args.scale = 6, 2, 1, 0.2
    return args


def main() -> None:
    """Measure everything; print two tables and one JSON line."""
    args = arguments()
    heavy, plain = heavy_tails(args), one_step(args)
    ours = heavy["rollgym"]
    print(
        json.dumps(
            {
                "benchmark": "rollout",
                "in_flight": IN_FLIGHT,
                "ratio_to_bound": round(ours.to_bound[0], 4),
                "ratio_to_bound_with_slow_one": round(ours.to_bound[1], 4),
                "slow_one_shift": round(ours.shift, 4),
                "turn_barrier_ratio": round(heavy["turn barrier"].to_bound[0], 3),
                "batch_barrier_ratio": round(heavy["batch barrier"].to_bound[0], 3),
                "barrier_slow_one_shift": {
                    name: round(heavy[name].shift, 3) for name in ("turn barrier", "batch barrier")
                },
                "one_step_seconds_per_batch": {
                    name: [round(seconds, 4) for seconds in row.interval] for name, row in plain.items()
                },
            }
        )
    )


if __name__ == "__main__":
    main()
