"""SGLang servers in a run on Ray: where the plan puts them, and how they are started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rollgym.cluster.engine import RemoteEngine
from rollgym.cluster.placement import Placed
from rollgym.engines.sglang import ServerOptions
from rollgym.engines.sglang.actor import SglangActor, server_places
from rollgym.trainer.config import TrainConfig


def sglang_places(config: TrainConfig, placed: Placed) -> list[dict[str, Any]]:
    """One place for each server; none where they run already, at ``engine.url``."""
    if config.engine.url is not None:
        return []
    seats = [seat.options() for seat in placed.seats["actor_infer"]]
    size = placed.plan.placements["actor_infer"].tensor_parallel
    return server_places(seats, size, config.engine.replicas)


async def start_sglang(
    config: TrainConfig, model: Path, place: dict[str, Any], placed: Placed | None
) -> RemoteEngine:
    """A server in an actor's care; it can give up its memory where the plan has it do so."""
    releases = placed is not None and bool(placed.plan.placements["actor_infer"].offload)
    server = ServerOptions(python=config.engine.python or sys.executable, memory_saver=releases)
    return await SglangActor.start(
        model.absolute(), place=place, server=server, heartbeat_timeout=config.heartbeat_timeout
    )
