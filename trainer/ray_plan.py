"""The plan of a run on Ray: for all devices at the start, and for what is left after a loss."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from rollgym.cluster.connect import Connection
from rollgym.cluster.errors import first_sentence
from rollgym.cluster.waiting import INTERVAL, Say, tell
from rollgym.devices.detail import describe
from rollgym.devices.planner import make_plan
from rollgym.devices.types import DeviceWishes, Plan
from rollgym.errors import UsageError
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.planning import WhatIf, job_of

LOOK = 2.0
"""Seconds between two looks at which nodes there are."""


def plan_first(config: TrainConfig, connection: Connection, wishes: DeviceWishes | None = None) -> Plan:
    """The plan for a cluster as it is. `UsageError` where the run cannot fit."""
    cluster = connection.cluster
    return make_plan(cluster, job_of(config, cluster, WhatIf()), wishes or config.devices).plan


async def plan_again(
    config: TrainConfig,
    connection: Connection,
    whole: int,
    *,
    interval: float = INTERVAL,
    look: float = LOOK,
    say: Say = tell,
) -> tuple[Plan, Connection]:
    """A plan for the nodes that there are now, once they are enough.

    Args:
        config: With ``devices.when_lost``: whether what is left may be enough.
        connection: As it was before.
        whole: Devices that there were at the start.
        interval: Seconds between two words about what is missing.
        look: Seconds between two looks at the cluster.
        say: Is told.
    """
    said = -interval
    while True:
        now = await asyncio.to_thread(connection.again)
        missing = whole - len(now.cluster.devices)
        try:
            if missing > 0 and config.devices.when_lost == "wait":
                raise UsageError("devices.when_lost is wait.")
            return _loosened(config, now), now
        except UsageError as error:
            if missing <= 0:
                raise
            if time.monotonic() - said >= interval:
                said = time.monotonic()
                left = describe(now.cluster)
                why = first_sentence(str(error))
                say(f"The run waits for {missing} of its {whole} devices; there are {left} ({why}).")
        await asyncio.sleep(look)


def _loosened(config: TrainConfig, connection: Connection) -> Plan:
    """A plan as it was wished, or else without wishes for devices that have gone."""
    wishes = config.devices
    try:
        return plan_first(config, connection)
    except UsageError:
        free = DeviceWishes(tensor_parallel=wishes.tensor_parallel, offload=wishes.offload)
        if replace(wishes, when_lost="replan") == free:
            raise
        return plan_first(config, connection, free)
