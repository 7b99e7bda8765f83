"""What the scheduler itself costs: CPU time of the controller for each turn, by episodes in flight.

    python benchmarks/controller.py [--quick] [--event-log] [--gc-threshold 20000] [--group-size 8]

Environments and agent answer at once, so all the time there is goes to the scheduler, asyncio and the
records of the turns. The time is the process's own (user and system, not wall time); the numbers of episodes
in flight take turns over several rounds, and the median round counts. The goal is at most 1 ms per turn, no
dearer with 4,096 episodes in flight than with 64. Time grows a little all the same, because so many episodes
do not fit into a CPU's cache; so the calls of functions per turn are counted, too, in a separate round:
they show whether the scheduler does more for a turn when more play. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rollgym.core.agent import AgentAction, Briefing
from rollgym.core.types import EpisodeSpec, Group
from rollgym.pool.base import EnvSession, Reset, Step
from rollgym.rollout import gc_tuning as garbage
from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.events import EventLog
from rollgym.rollout.group_state import GroupPolicy
from rollgym.rollout.scheduler import Scheduler
from rollgym.rollout.task_sampler import EnvSource, TaskSampler

MEAN_TURNS = 8


class InstantPool:
    """Environments that answer at once, after 4 to 12 turns for the last time."""

    async def open(self, spec: EpisodeSpec) -> InstantSession:
        """An environment whose number of turns depends on the episode."""
        turns = random.Random(spec.sampling_seed).randint(MEAN_TURNS // 2, MEAN_TURNS * 3 // 2)
        return InstantSession(turns)

    async def close(self) -> None:
        """There is nothing to close."""


@dataclass(slots=True)
class InstantSession(EnvSession):
    """One episode; each call gives the event loop one turn, as a real answer would."""

    turns_left: int

    async def reset(self) -> Reset:
        """Begin."""
        await asyncio.sleep(0)
        return Reset(observation="start", info={"success": False})

    async def step(self, action: str) -> Step:
        """One turn less to play."""
        await asyncio.sleep(0)
        self.turns_left -= 1
        over = self.turns_left == 0
        return Step(observation="next", reward=0.0, terminated=over, truncated=False, info={"success": over})

    async def close(self) -> None:
        """There is nothing to close."""


class InstantAgent:
    """Answers at once with a few tokens; one player serves all."""

    def player(self, briefing: Briefing) -> InstantAgent:
        """The agent keeps no state."""
        return self

    async def act(self, observation: str, info: Mapping[str, Any]) -> AgentAction:
        """Always the same move."""
        await asyncio.sleep(0)
        return AgentAction(
            action="go", prompt_ids=(1, 2), action_ids=(3,), logprobs=(-0.5,), policy_version=0
        )

    async def close(self) -> None:
        """There is nothing to close."""


async def cpu_per_turn(in_flight: int, args: argparse.Namespace, log: EventLog) -> float:
    """CPU seconds per turn of the groups taken, after warm-up."""
    groups = GroupPolicy(size=args.group_size)
    config = SchedulerConfig(
        max_in_flight=in_flight, groups=groups, order=args.order, max_overtakes=args.max_overtakes
    )
    stream = TaskSampler([EnvSource(env_id="none")])
    wave = max(1, in_flight // args.group_size)
    # Windows of whole waves: what began before them, and what does not end in time, must weigh little.
    least = max(args.turns, args.waves * in_flight * MEAN_TURNS)
    async with Scheduler(stream, InstantPool(), InstantAgent(), config, log=log) as scheduler:
        await scheduler.take(args.waves * wave)
        gc.collect()
        started = time.process_time()
        turns = 0
        while turns < least:
            turns += _turns(await scheduler.take(min(wave, 64)))
        return (time.process_time() - started) / turns


def calls_per_turn(in_flight: int, args: argparse.Namespace) -> float:
    """Function calls per turn, Python and C."""
    counted = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    async def play() -> int:
        config = SchedulerConfig(max_in_flight=in_flight, groups=GroupPolicy(size=args.group_size))
        stream = TaskSampler([EnvSource(env_id="none")])
        async with Scheduler(stream, InstantPool(), InstantAgent(), config) as scheduler:
            wave = max(1, in_flight // args.group_size)
            await scheduler.take(wave)
            sys.setprofile(count)
            try:
                return _turns(await scheduler.take(2 * wave))
            finally:
                sys.setprofile(None)

    turns = asyncio.run(play())
    return counted / turns


def _turns(groups: list[Group]) -> int:
    return sum(episode.length for group in groups for episode in group.episodes)


def measure(in_flight: int, args: argparse.Namespace) -> float:
    """One round, with or without an event log on disk."""
    if not args.event_log:
        return asyncio.run(cpu_per_turn(in_flight, args, EventLog()))
    with tempfile.TemporaryDirectory() as folder, EventLog(Path(folder) / "events.jsonl") as log:
        return asyncio.run(cpu_per_turn(in_flight, args, log))


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--order", choices=["ready", "strict"], default="ready")
    parser.add_argument("--turns", type=int, default=40_000, help="turns measured in each round, at least")
    parser.add_argument(
        "--waves", type=int, default=2, help="lives of all in flight, at least, after as many to warm up"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-overtakes", type=int, help="as in the scheduler's settings")
    parser.add_argument("--gc-threshold", type=int, help="new objects before Python looks for garbage")
    parser.add_argument("--event-log", action="store_true", help="write every event to a file, too")
    parser.add_argument("--quick", action="store_true", help="one short round")
    args = parser.parse_args()
    if args.quick:
        args.turns, args.waves, args.rounds = 10_000, 1, 1
    return args


def main() -> None:
    """Measure each number of episodes in flight in turn; print a table and one JSON line."""
    args = arguments()
    if args.gc_threshold:
        gc.set_threshold(args.gc_threshold)
        garbage.NEW_OBJECTS = args.gc_threshold
    rounds: dict[int, list[float]] = {in_flight: [] for in_flight in args.in_flight}
    for _ in range(args.rounds):
        for in_flight in rounds:
            rounds[in_flight].append(1000 * measure(in_flight, args))
    calls = {in_flight: calls_per_turn(in_flight, args) for in_flight in rounds}
    medians = {in_flight: statistics.median(values) for in_flight, values in rounds.items()}
    log = "with" if args.event_log else "without"
    print(f"groups of {args.group_size}, order {args.order}, {log} event log, {args.rounds} rounds, ", end="")
    print(f"gc threshold {garbage.NEW_OBJECTS}\n")
    print(f"{'in flight':>10}{'ms per turn':>14}{'least':>10}{'most':>10}{'calls':>8}")
    for in_flight, values in rounds.items():
        print(
            f"{in_flight:10,}{medians[in_flight]:14.4f}{min(values):10.4f}{max(values):10.4f}{calls[in_flight]:8.0f}"
        )
    print(
        json.dumps(
            {
                "benchmark": "controller",
                "event_log": args.event_log,
                "group_size": args.group_size,
                "gc_threshold": garbage.NEW_OBJECTS,
                "ms_per_turn": {str(count): round(ms, 4) for count, ms in medians.items()},
                "flat_ratio": round(medians[max(medians)] / medians[min(medians)], 3),
                "calls_per_turn": {str(count): round(n, 1) for count, n in calls.items()},
                "calls_ratio": round(calls[max(calls)] / calls[min(calls)], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
