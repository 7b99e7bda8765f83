"""Env steps per second: rollgym's pools against Gymnasium's vector environments, on the same Sokoban.

    python benchmarks/env_steps.py [--quick] [--env ID] [--envs 16] [--workers 2] [--seconds 5]

Every contender plays the same environment class with the same kind of actions, in one run, in turn, several
rounds; the median round counts. Figures are comparable within a run only: read the ratios. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable

import gymnasium as gym
import numpy as np

import rollgym
from rollgym.core.types import EpisodeSpec
from rollgym.pool.base import EnvPool
from rollgym.pool.inline import InlinePool
from rollgym.pool.local import LocalPool

ACTIONS = ("Up", "Down", "Left", "Right")
Contender = Callable[[argparse.Namespace], float]


def vector_env(args: argparse.Namespace, asynchronous: bool) -> float:
    """Steps per second of a Gymnasium vector environment, which waits for its slowest member each step."""
    makers = [lambda: rollgym.make(args.env) for _ in range(args.envs)]
    envs: gym.vector.VectorEnv = (
        gym.vector.AsyncVectorEnv(makers, shared_memory=False, context="forkserver")
        if asynchronous
        else gym.vector.SyncVectorEnv(makers)
    )
    rng = np.random.default_rng(0)
    envs.reset(seed=0)
    steps, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < args.seconds:
        envs.step(tuple(rng.choice(ACTIONS, size=args.envs)))
        steps += args.envs
    envs.close()
    return steps / elapsed


def pool(args: argparse.Namespace, workers: int) -> float:
    """Steps per second of one of our pools, where every environment goes its own way."""
    return asyncio.run(_drive(InlinePool() if workers == 0 else LocalPool(workers), args))


async def _drive(pool: EnvPool, args: argparse.Namespace) -> float:
    # As with the vector environments, starting the workers is not part of the time.
    first = [await pool.open(_spec(args.env, lane)) for lane in range(args.envs)]
    for session in first:
        await session.reset()
        await session.close()
    started = time.perf_counter()
    counts = await asyncio.gather(*(_lane(pool, args, lane, started) for lane in range(args.envs)))
    elapsed = time.perf_counter() - started
    await pool.close()
    return sum(counts) / elapsed


async def _lane(pool: EnvPool, args: argparse.Namespace, lane: int, started: float) -> int:
    rng = np.random.default_rng(lane)
    steps = 0
    for episode in itertools.count():
        session = await pool.open(_spec(args.env, lane * 1_000 + episode))
        await session.reset()
        over = False
        while not over:
            step = await session.step(ACTIONS[rng.integers(4)])
            steps += 1
            over = step.terminated or step.truncated
            if time.perf_counter() - started > args.seconds:
                await session.close()
                return steps
        await session.close()
    raise AssertionError("the count is endless")


def _spec(env_id: str, number: int) -> EpisodeSpec:
    return EpisodeSpec(episode_id=str(number), env_id=env_id, task=number % 1_000, env_seed=number)


def main() -> None:
    """Measure all contenders in turn and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--env", default="rollgym/Sokoban-v0")
    parser.add_argument("--envs", type=int, default=16, help="environments at once")
    parser.add_argument("--workers", type=int, default=2, help="processes of our pool")
    parser.add_argument("--seconds", type=float, default=5.0, help="per contender and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.rounds = 1.0, 1
    contenders: dict[str, Contender] = {
        "gymnasium SyncVectorEnv": lambda a: vector_env(a, asynchronous=False),
        "gymnasium AsyncVectorEnv": lambda a: vector_env(a, asynchronous=True),
        "rollgym InlinePool": lambda a: pool(a, 0),
        f"rollgym LocalPool ({args.workers} workers)": lambda a: pool(a, args.workers),
    }
    rounds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, measure in contenders.items():
            rounds[name].append(measure(args))
    rates = {name: statistics.median(values) for name, values in rounds.items()}
    base = rates["gymnasium AsyncVectorEnv"]
    print(f"{args.env}, {args.envs} environments, {args.rounds} x {args.seconds:g} s each\n")
    print(f"{'':36}{'steps/s':>10}{'x Async':>10}{'x Sync':>10}")
    for name, rate in rates.items():
        print(f"{name:36}{rate:10,.0f}{rate / base:10.2f}{rate / rates['gymnasium SyncVectorEnv']:10.2f}")
    local = next(rate for name, rate in rates.items() if "LocalPool" in name)
    print(
        json.dumps(
            {
                "benchmark": "env_steps",
                "env": args.env,
                "envs": args.envs,
                "steps_per_second": {name: round(rate) for name, rate in rates.items()},
                "local_to_async": round(local / base, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
