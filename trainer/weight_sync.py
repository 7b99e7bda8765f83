"""Weight sync of a run: the route of weights from learner to engine, and its counts.

In one process the engine copies the learner's weights (``memory``), and servers get them by their route. On
Ray each rank stores its shards in buckets, as objects (``object_store``) or files (``disk``); engines in
actors fetch them, and pass them on to a server by its route.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rollgym.engines.base import Engine, WeightSource
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.learner.protocol import Metrics

if TYPE_CHECKING:  # imports torch, which a mistake in a config is reported without
    from rollgym.engines.weight_sync.wire import Sent, WireFormat

FOLDER = ".weights"
"""Folder of a run with files of weights on their way to engines (``engine.weight_route=disk`` on Ray)."""


def wire_format(config: TrainConfig, engine: Engine, folder: Path, nodes: int = 1) -> WireFormat:
    """How the ranks of a learner on Ray send weights to this engine.

    Args:
        config: The run's settings.
        engine: The engine, which knows its dtype.
        folder: The run's folder.
        nodes: Number of nodes of the cluster.
    """
    from rollgym.engines.weight_sync.wire import WireFormat

    settings = config.engine
    dtype = cast(Literal["float32", "bfloat16", "float16"], engine.weight_dtype)
    delta = settings.weight_delta
    if delta == "auto":
        # Of float32 values almost all change in every step, so a delta would save nothing. On one machine
        # engines read what ranks store without copying it, and encoding takes longer than that.
        delta = dtype != "float32" and nodes > 1
    on_disk = settings.kind == "embedded" and settings.weight_route == "disk"
    return WireFormat(
        dtype=dtype,
        delta=delta and settings.url is None,
        full_every=settings.full_update_every,
        folder=folder.absolute() / FOLDER if on_disk else None,
    )


async def raise_rank_error(source: WeightSource) -> None:
    """Raise the error of the ranks if they could not send all weights."""
    from rollgym.engines.weight_sync.chain import WeightChain

    if isinstance(source.tensors, WeightChain):
        await asyncio.to_thread(source.tensors.last.wait)


def sync_plan(config: TrainConfig, engine: Engine, folder: Path, nodes: int = 1) -> dict[str, Any]:
    """The route of weights, as in ``plan.json``."""
    plan: dict[str, Any] = {"dtype": engine.weight_dtype}
    if config.runtime == "local":
        to_servers = config.engine.kind != "embedded" and config.engine.weight_delta is True
        more = {"full_update_every": config.engine.full_update_every} if to_servers else {}
        return {"route": engine.weight_route, **plan, "delta": to_servers, **more}
    wire = wire_format(config, engine, folder, nodes)
    plan["route"] = "object_store" if wire.folder is None else "disk"
    if config.engine.kind != "embedded":
        plan["to_server"] = engine.weight_route
    plan["delta"] = wire.delta
    if wire.delta:
        plan["full_update_every"] = wire.full_every
    return plan


def plan_text(plan: Mapping[str, Any]) -> str:
    """One line about the route of weights."""
    parts = [str(plan["route"]).replace("_", " "), str(plan["dtype"])]
    if "to_server" in plan:
        parts[0] += f", then {plan['to_server']}"
    if plan["delta"]:
        every = plan["full_update_every"]
        parts.append(f"changed values only, every {every}th update in full" if every > 1 else "in full")
    return ", ".join(parts)


class SyncMeter:
    """Measures one weight sync."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def metrics(self, engine: Engine, source: WeightSource) -> Metrics:
        """Return seconds and bytes of the sync that ended now.

        Bytes are those that left the learner, counted once however many engines read them. ``changed_frac``
        is the fraction of values that a delta update changed.
        """
        from rollgym.engines.weight_sync.chain import WeightChain
        from rollgym.engines.weight_sync.wire import wire_bytes

        metrics: Metrics = {"weight_sync_seconds": time.perf_counter() - self._began}
        if isinstance(source.tensors, WeightChain):
            sent: Sent = source.tensors.sent
            metrics["weight_sync_bytes"] = float(sent.nbytes)
            if source.tensors.last.base is not None:
                metrics["weight_sync_changed_frac"] = sent.changed / max(sent.values, 1)
        elif engine.weight_bytes_sent is not None:
            metrics["weight_sync_bytes"] = float(engine.weight_bytes_sent)
        elif source.tensors is not None:
            metrics["weight_sync_bytes"] = float(
                wire_bytes(list(source.tensors.values()), engine.weight_dtype)
            )
        else:
            metrics["weight_sync_bytes"] = math.nan
        return metrics
