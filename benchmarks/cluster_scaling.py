"""Episodes per second of the pool on 1 to 4 simulated Ray nodes, with environments that mostly wait.

    python benchmarks/cluster_scaling.py [--quick] [--nodes 1 2 4] [--lanes 16] [--latency 0.25]

All nodes are on this machine, so only what waits can scale: each step sleeps. The real scheduler plays, with
as many episodes at once as there are lanes on all nodes. Efficiency is the rate over that of one node times
the nodes; overhead is the driver's CPU time per episode. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollgym import SoloAgent, StepResult, Task, TextEnv

TURNS = 8


class Patient(TextEnv):
    """Every step takes a while and no CPU time."""

    instructions = "Say anything."
    reward_range = (0.0, 1.0)

    def __init__(self, *, latency: float = 0.25, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self._latency = latency
        self._turns = 0

    def begin(self, task: Task) -> str:
        """Start."""
        self._turns = 0
        return "go"

    def respond(self, action: str) -> StepResult:
        """Wait."""
        time.sleep(self._latency * float(self.np_random.uniform(0.8, 1.2)))
        self._turns += 1
        return StepResult("on", 1.0, terminated=self._turns == TURNS, success=True)

    def random_action(self, observation: str, info: Mapping[str, Any], rng: np.random.Generator) -> str:
        """Anything."""
        return "on"


class Speaker(SoloAgent):
    """Always returns the same action."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The word."""
        return "on"


@dataclass(frozen=True)
class Measured:
    """One number of nodes."""

    nodes: int
    episodes: int
    seconds: float
    overhead_ms: float
    """Driver CPU time per episode."""
    share_of_bound: float
    """Rate relative to lanes that only wait for their environment."""

    @property
    def rate(self) -> float:
        """Episodes per second."""
        return self.episodes / self.seconds


async def measure(nodes: int, args: argparse.Namespace) -> Measured:
    """Measure on this many nodes."""
    from rollgym.cluster.pool import RayPool
    from rollgym.core.agent import AgentSetup, make_agent
    from rollgym.rollout.config import SchedulerConfig
    from rollgym.rollout.scheduler import Scheduler
    from rollgym.rollout.task_sampler import EnvSource, TaskSampler

    env = {"env_id": "cluster_scaling:Patient", "env_kwargs": {"latency": args.latency}}
    lanes = nodes * args.lanes
    pool = RayPool(nodes, workers=1)
    config = SchedulerConfig(max_in_flight=lanes, max_ahead=2 * lanes)
    agent = make_agent("cluster_scaling:Speaker", AgentSetup(**env))
    try:
        # Actors, workers and environments are there before the time begins.
        async with Scheduler(TaskSampler([EnvSource(**env)], seed=1), pool, agent, config) as scheduler:
            await scheduler.take(lanes)
            await scheduler.drain()
        async with Scheduler(TaskSampler([EnvSource(**env)], seed=2), pool, agent, config) as scheduler:
            began, used = time.perf_counter(), time.process_time()
            episodes = args.episodes * lanes
            groups = await scheduler.take(episodes)
            seconds, used = time.perf_counter() - began, time.process_time() - used
    finally:
        await agent.close()
        await pool.close()
    waits = sum(turn.seconds.step for group in groups for one in group.episodes for turn in one.turns)
    return Measured(nodes, episodes, seconds, 1e3 * used / episodes, waits / lanes / seconds)


def main() -> None:
    """Start the nodes, measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lanes", type=int, default=16, help="episodes at once on each node")
    parser.add_argument("--latency", type=float, default=0.25, help="seconds of a step")
    parser.add_argument("--episodes", type=int, default=8, help="for each lane")
    parser.add_argument("--quick", action="store_true", help="two nodes, few episodes")
    args = parser.parse_args()
    if args.quick:
        args.nodes, args.lanes, args.episodes = [1, 2], 4, 2
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    from ray.cluster_utils import Cluster

    from rollgym.cluster.connect import connect

    size = {"num_cpus": 2, "object_store_memory": 200 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        for _ in range(max(args.nodes) - 1):
            cluster.add_node(**size)
        with connect(str(cluster.address)):
            found = [asyncio.run(measure(nodes, args)) for nodes in args.nodes]
    finally:
        cluster.shutdown()
    one = found[0]
    print(f"{args.lanes} lanes a node, {TURNS} steps of {args.latency:g} s an episode\n")
    print(f"{'nodes':>5}{'episodes/s':>12}{'efficiency':>12}{'of the bound':>14}{'driver ms/episode':>19}")
    table = {}
    for each in found:
        efficiency = each.rate / one.rate * one.nodes / each.nodes
        print(
            f"{each.nodes:5}{each.rate:12.2f}{efficiency:12.2f}{each.share_of_bound:14.2f}"
            f"{each.overhead_ms:19.2f}"
        )
        table[str(each.nodes)] = {
            "episodes_per_second": round(each.rate, 3),
            "efficiency": round(efficiency, 3),
            "share_of_bound": round(each.share_of_bound, 3),
            "overhead_ms": round(each.overhead_ms, 2),
        }
    last = table[str(found[-1].nodes)]
    print(
        json.dumps(
            {
                "benchmark": "cluster_scaling",
                "efficiency": last["efficiency"],
                "overhead_ms": last["overhead_ms"],
                "nodes": table,
            }
        )
    )


if __name__ == "__main__":
    main()
