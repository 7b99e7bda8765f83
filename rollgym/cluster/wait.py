"""Waiting for cluster resources, with status messages."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgym.cluster.errors import PlacementError, need_ray
from rollgym.utils.terminal import printable

Report = Callable[[str], None]
INTERVAL = 30.0
"""Seconds between two status messages."""


def print_status(message: str) -> None:
    """Print a status message to stderr."""
    print(printable(message), file=sys.stderr, flush=True)


async def wait_for_resources(
    result: Any,
    needs: Mapping[str, float] | Sequence[Mapping[str, float]],
    subject: str,
    interval: float = INTERVAL,
    report: Report = print_status,
    timeout: float | None = None,
) -> Any:
    """Await a result that needs cluster resources, and report missing resources meanwhile.

    ``needs`` are the resources on one node, or on each of several. ``subject`` begins every message.
    Raises `PlacementError` after ``timeout`` seconds.
    """
    future = asyncio.ensure_future(result)
    began = time.monotonic()
    try:
        while True:
            left = None if timeout is None else max(timeout - (time.monotonic() - began), 0)
            pause = interval if left is None else min(interval, left)
            done, _ = await asyncio.wait([future], timeout=pause)
            if done:
                return future.result()
            message = missing_resources(needs, subject)
            if left is not None and left <= interval:
                raise PlacementError(f"{message.rstrip('.')}. Timed out after {timeout:g} s.")
            report(message)
    finally:
        future.cancel()


def missing_resources(needs: Mapping[str, float] | Sequence[Mapping[str, float]], subject: str) -> str:
    """Describe the needed, existing and free resources in a sentence."""
    parts = [needs] if isinstance(needs, Mapping) else list(needs)
    ray = need_ray()
    has, free = ray.cluster_resources(), ray.available_resources()
    nodes = sum(node["Alive"] for node in ray.nodes())
    notes = []
    for name in sorted({name for part in parts for name in part}):
        amount = sum(part.get(name, 0.0) for part in parts)
        if amount:
            notes.append(f"{amount:g} {name} (total {has.get(name, 0.0):g}, free {free.get(name, 0.0):g})")
    spread = f" on {len(parts)} nodes" if len(parts) > 1 else " on one node"
    return (
        f"{subject} is waiting for {', '.join(notes)}{spread}; the cluster has {nodes} "
        f"node{'s' * (nodes != 1)}."
    )


def alive_nodes() -> frozenset[str]:
    """Return the Ray ids of the nodes that are alive."""
    return frozenset(node["NodeID"] for node in need_ray().nodes() if node["Alive"])
