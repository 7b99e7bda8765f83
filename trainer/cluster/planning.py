"""The device plan of a run on Ray: for all nodes at the start, and for the remaining nodes after a loss."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from rollgym.cluster.connect import Connection
from rollgym.cluster.errors import first_sentence
from rollgym.cluster.placement import PlacedPlan
from rollgym.cluster.wait import INTERVAL, Report, print_status
from rollgym.core.errors import UsageError
from rollgym.devices.planner import make_plan
from rollgym.devices.ranges import format_range
from rollgym.devices.report import describe
from rollgym.devices.types import DeviceConfig, Plan
from rollgym.trainer.cluster.workload import WhatIf, check_mesh, job_of
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.runtime import RunPlan

LOOK = 2.0
"""Seconds between two checks of the cluster's nodes."""


def plan_first(config: TrainConfig, connection: Connection, devices: DeviceConfig | None = None) -> Plan:
    """Plan for the cluster as it is now.

    Raises:
        UsageError: The run does not fit.
    """
    cluster = connection.cluster
    plan = make_plan(cluster, job_of(config, cluster, WhatIf()), devices or config.devices).plan
    check_mesh(config, plan)
    return plan


async def plan_again(
    config: TrainConfig,
    connection: Connection,
    whole: int,
    *,
    interval: float = INTERVAL,
    look: float = LOOK,
    say: Report = print_status,
) -> tuple[Plan, Connection]:
    """Plan for the current nodes, waiting until they are enough.

    ``devices.when_lost`` decides whether fewer devices than ``whole``, those at the start, may be enough.
    """
    last_message = -interval
    while True:
        now = await asyncio.to_thread(connection.refresh)
        missing = whole - len(now.cluster.devices)
        try:
            if missing > 0 and config.devices.when_lost == "wait":
                raise UsageError("devices.when_lost is wait.")
            return _plan_without_lost_pins(config, now), now
        except UsageError as error:
            if missing <= 0:
                raise
            if time.monotonic() - last_message >= interval:
                last_message = time.monotonic()
                present, why = describe(now.cluster), first_sentence(str(error))
                say(f"Waiting for {missing} of {whole} devices; the cluster has {present} ({why}).")
        await asyncio.sleep(look)


def _plan_without_lost_pins(config: TrainConfig, connection: Connection) -> Plan:
    """Plan as configured, or without pinned devices if those are gone."""
    devices = config.devices
    try:
        return plan_first(config, connection)
    except UsageError:
        free = DeviceConfig(tensor_parallel=devices.tensor_parallel, offload=devices.offload)
        if replace(devices, when_lost="replan") == free:
            raise
        return plan_first(config, connection, free)


def run_plan(
    config: TrainConfig, placed: PlacedPlan, strategy: str, engines: int, env_actors: int
) -> RunPlan:
    """The plan of a run on a cluster, with the devices of each role, as in ``plan.json``."""
    plan, workers = placed.plan, config.rollout.workers
    roles: dict[str, Any] = {
        role: {
            "devices": format_range(placement.devices, plan.cluster),
            "tensor_parallel": placement.tensor_parallel,
            "data_parallel": placement.data_parallel,
            "offload": list(placement.offload),
        }
        for role, placement in plan.placements.items()
        if placement.devices
    }
    inside = f"{workers} worker processes in each" if workers else "environments in the actor itself"
    return {
        "runtime": "ray",
        "layout": plan.layout,
        "strategy": strategy,
        "ranks": len(placed.slots["actor_train"]),
        "engine": config.engine.kind,
        "engines": engines,
        "environments": f"{env_actors} env actor{'s' * (env_actors != 1)}, {inside}",
        "devices": describe(plan.cluster),
        "roles": roles,
    }
