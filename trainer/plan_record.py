"""The plan of a run as it is printed and kept: layout, strategy, ranks, engines, who works where."""

from __future__ import annotations

from typing import Any

from rollgym.cluster.placement import Placed
from rollgym.devices.detail import describe
from rollgym.devices.ranges import format_range
from rollgym.trainer.config import TrainConfig

PLAN = "plan.json"
RunPlan = dict[str, Any]
"""Plain values, as in ``plan.json``."""


def local_plan(config: TrainConfig, engines: int, device: str) -> RunPlan:
    """The plan of a run in this process."""
    workers = config.rollout.workers
    return {
        "runtime": "local",
        "layout": "colocated",
        "strategy": "local",
        "ranks": 1,
        "engine": config.engine.kind,
        "engines": engines,
        "environments": f"{workers} worker processes" if workers else "in the trainer's process",
        "devices": device,
        "roles": {},
    }


def ray_plan(config: TrainConfig, placed: Placed, strategy: str, engines: int, env_actors: int) -> RunPlan:
    """The plan of a run on a cluster, with the devices of each role."""
    plan, workers = placed.plan, config.rollout.workers
    roles = {
        role: {
            "devices": format_range(one.devices, plan.cluster),
            "tensor_parallel": one.tensor_parallel,
            "data_parallel": one.data_parallel,
            "offload": list(one.offload),
        }
        for role, one in plan.placements.items()
        if one.devices
    }
    inside = f"{workers} worker processes in each" if workers else "environments in the actor itself"
    return {
        "runtime": "ray",
        "layout": plan.layout,
        "strategy": strategy,
        "ranks": len(placed.seats["actor_train"]),
        "engine": config.engine.kind,
        "engines": engines,
        "environments": f"{env_actors} env actor{'s' * (env_actors != 1)}, {inside}",
        "devices": describe(plan.cluster),
        "roles": roles,
    }


def plan_line(plan: RunPlan) -> str:
    """A plan in one line."""
    ranks, engines = plan["ranks"], plan["engines"]
    return (
        f"{plan['runtime']}, {plan['layout']}, strategy {plan['strategy']} on {ranks} "
        f"rank{'s' * (ranks != 1)}, {engines} {plan['engine']} engine{'s' * (engines != 1)}"
    )


def plan_lines(plan: RunPlan) -> list[str]:
    """A plan as a block of lines for the console."""
    lines = [f"plan: {plan_line(plan)}", f"  devices       {plan['devices']}"]
    for role, one in plan["roles"].items():
        spread = f"{one['tensor_parallel']} x {one['data_parallel']} (tensor x data parallel)"
        leaves = f", offloads {', '.join(one['offload'])}" if one["offload"] else ""
        lines.append(f"  {role:13} {one['devices']}, {spread}{leaves}")
    return [*lines, f"  environments  {plan['environments']}"]
