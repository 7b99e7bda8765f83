"""Env steps per second through the pool of worker processes, against Gymnasium's AsyncVectorEnv.

    python benchmarks/pool_steps.py [--quick] [--env ID] [--envs 16 64] [--workers 2] [--seconds 3]

Both play the same environment with the same kind of actions, in turn, several rounds; the median counts. On a
machine that others use too, steps per second are as noisy as their work; CPU time per step, summed over
all processes of a contender, is steadier. Read the ratios. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym

import rollgym
from rollgym.core.types import EpisodeSpec
from rollgym.pool.local import LocalPool


class Rate(NamedTuple):
    """What one contender did in one round."""

    per_second: float
    cpu_us: float


class Clock:
    """Wall and CPU time of this process and all its descendants, from now on."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    @property
    def seconds(self) -> float:
        """Wall time so far."""
        return time.perf_counter() - self._wall

    def rate(self, steps: int) -> Rate:
        """The rate of so many steps until now."""
        return Rate(steps / self.seconds, 1e6 * (_cpu_seconds() - self._cpu) / steps)


def _cpu_seconds() -> float:
    """CPU time of this process and its living descendants."""
    parents, times = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid], times[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(times[pid] for pid in family) / os.sysconf("SC_CLK_TCK")


def async_vector_env(args: argparse.Namespace, envs: int) -> Rate:
    """A Gymnasium AsyncVectorEnv: one process per environment, all in step."""
    multiprocessing.set_forkserver_preload(["rollgym"])  # else most of the time goes into starting it
    makers = [lambda: rollgym.make(args.env)] * envs
    vector = gym.vector.AsyncVectorEnv(makers, shared_memory=False, context="forkserver")
    rng = random.Random(0)
    vector.reset(seed=0)
    clock, steps = Clock(), 0
    while clock.seconds < args.seconds:
        vector.step(tuple(rng.choice(args.actions) for _ in range(envs)))
        steps += envs
    rate = clock.rate(steps)
    vector.close()
    return rate


def local_pool(args: argparse.Namespace, envs: int) -> Rate:
    """Our pool: every environment goes its own way."""
    return asyncio.run(_drive(args, envs))


async def _drive(args: argparse.Namespace, envs: int) -> Rate:
    pool = LocalPool(args.workers)
    # As with the vector environment, starting processes and making environments is not part of the time.
    first = [await pool.open(_spec(args.env, env_thread)) for env_thread in range(envs)]
    await asyncio.gather(*(session.reset() for session in first))
    for session in first:
        await session.close()
    clock = Clock()
    counts = await asyncio.gather(*(_env_thread(pool, args, env_thread, clock) for env_thread in range(envs)))
    rate = clock.rate(sum(counts))
    await pool.close()
    return rate


async def _env_thread(pool: LocalPool, args: argparse.Namespace, env_thread: int, clock: Clock) -> int:
    rng = random.Random(env_thread)
    steps = 0
    for episode in itertools.count():
        session = await pool.open(_spec(args.env, env_thread * 1_000 + episode))
        await session.reset()
        over = False
        while not over and clock.seconds < args.seconds:
            step = await session.step(rng.choice(args.actions))
            steps += 1
            over = step.terminated or step.truncated
        await session.close()
        if not over:
            return steps
    raise AssertionError("the count is endless")


def _spec(env_id: str, number: int) -> EpisodeSpec:
    return EpisodeSpec(episode_id=str(number), env_id=env_id, task=number % 1_000, env_seed=number)


def measure(args: argparse.Namespace, envs: int) -> dict[str, Rate]:
    """The median rates of both contenders, who take turns."""
    contenders: dict[str, Callable[[argparse.Namespace, int], Rate]] = {
        "async": async_vector_env,
        "pool": local_pool,
    }
    rounds: dict[str, list[Rate]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, run in contenders.items():
            rounds[name].append(run(args, envs))
    return {
        name: Rate(*(statistics.median(values) for values in zip(*rates, strict=True)))
        for name, rates in rounds.items()
    }


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--env", default="rollgym/Sokoban-v0")
    parser.add_argument("--actions", nargs="+", default=["Up", "Down", "Left", "Right"])
    parser.add_argument("--envs", type=int, nargs="+", default=[16, 64], help="environments at once")
    parser.add_argument("--workers", type=int, default=2, help="processes of our pool")
    parser.add_argument("--seconds", type=float, default=3.0, help="per contender and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.rounds = 1.0, 2
    result: dict[str, dict[str, float]] = {}
    print(f"{args.env}, {args.workers} workers, median of {args.rounds} x {args.seconds:g} s\n")
    print(f"{'envs':>5} {'':18}{'steps/s':>10}{'CPU us/step':>13}")
    for envs in args.envs:
        rates = measure(args, envs)
        vector, pool = rates["async"], rates["pool"]
        print(f"{envs:5} {'AsyncVectorEnv':18}{vector.per_second:10,.0f}{vector.cpu_us:13.0f}")
        print(f"{envs:5} {'LocalPool':18}{pool.per_second:10,.0f}{pool.cpu_us:13.0f}")
        result[str(envs)] = {
            "async_steps_per_second": round(vector.per_second),
            "pool_steps_per_second": round(pool.per_second),
            "ratio_to_async": round(pool.per_second / vector.per_second, 2),
            "cpu_ratio_to_async": round(vector.cpu_us / pool.cpu_us, 2),
        }
    least = min(figures["ratio_to_async"] for figures in result.values())
    print(json.dumps({"benchmark": "pool_steps", "env": args.env, "ratio_to_async": least, "envs": result}))


if __name__ == "__main__":
    main()
