"""Waiting for a cluster, and saying for what."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgym.cluster.errors import PlacementError, need_ray
from rollgym.terminal import printable

Say = Callable[[str], None]
INTERVAL = 30.0
"""Seconds between two words about what is missing."""


def tell(sentence: str) -> None:
    """Say something to whoever watches the run."""
    print(printable(sentence), file=sys.stderr, flush=True)


async def waiting(
    what: Any,
    needs: Mapping[str, float] | Sequence[Mapping[str, float]],
    who: str,
    interval: float = INTERVAL,
    say: Say = tell,
    timeout: float | None = None,
) -> Any:
    """Await something that starts once there is room, saying what is missing as long as there is none.

    Args:
        what: An awaitable, such as a reference of Ray's.
        needs: Resources, of one node or of several.
        who: Waits.
        interval: Seconds between two sentences.
        say: Is told.
        timeout: Seconds after which it is given up, with that sentence.
    """
    future = asyncio.ensure_future(_awaited(what))
    began = time.monotonic()
    try:
        while True:
            left = None if timeout is None else max(timeout - (time.monotonic() - began), 0)
            pause = interval if left is None else min(interval, left)
            done, _ = await asyncio.wait([future], timeout=pause)
            if done:
                return future.result()
            sentence = missing(needs, who)
            if left is not None and left <= interval:
                raise PlacementError(f"{sentence.rstrip('.')}, and is given up after {timeout:g} s.")
            say(sentence)
    finally:
        future.cancel()


async def _awaited(what: Any) -> Any:
    return await what


def missing(needs: Mapping[str, float] | Sequence[Mapping[str, float]], who: str) -> str:
    """What is needed, what there is, and what of that is free, in a sentence."""
    parts = [needs] if isinstance(needs, Mapping) else list(needs)
    ray = need_ray()
    has, free = ray.cluster_resources(), ray.available_resources()
    nodes = sum(node["Alive"] for node in ray.nodes())
    notes = []
    for name in sorted({name for part in parts for name in part}):
        amount = sum(part.get(name, 0.0) for part in parts)
        if amount:
            notes.append(f"{amount:g} {name} ({has.get(name, 0.0):g} there, {free.get(name, 0.0):g} free)")
    spread = f" on {len(parts)} nodes" if len(parts) > 1 else " on one node"
    return f"{who} waits for {', '.join(notes)}{spread}; the cluster has {nodes} node{'s' * (nodes != 1)}."


def living_nodes() -> frozenset[str]:
    """Ray's ids of the nodes that are up."""
    return frozenset(node["NodeID"] for node in need_ray().nodes() if node["Alive"])
