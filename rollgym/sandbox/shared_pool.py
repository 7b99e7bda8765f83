"""Sandbox pools shared by the environments of a process; closed with their last user."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from rollgym.sandbox.factory import open_sandbox
from rollgym.sandbox.pool import PoolCounts, SandboxPool
from rollgym.sandbox.types import Sandbox, SandboxSettings

AHEAD = 1
"""Unused sandboxes kept ready, for hidden tests and to replace broken ones."""

Opener = Callable[[SandboxSettings], Sandbox]


@dataclass(slots=True)
class _Shared:
    pool: SandboxPool
    users: int = 0


_lock = threading.RLock()
_shared: dict[tuple[SandboxSettings, Opener], _Shared] = {}


def join(settings: SandboxSettings, opener: Opener = open_sandbox) -> SandboxPool:
    """Return the shared pool for these settings. Pair each call with `leave`."""
    with _lock:
        found = _shared.get((settings, opener))
        if found is None:
            pool = SandboxPool(settings, size=None, ahead=AHEAD, opener=opener)
            found = _shared[settings, opener] = _Shared(pool)
        found.users += 1
        return found.pool


def leave(pool: SandboxPool) -> None:
    """Release a shared pool; the last release closes its sandboxes."""
    with _lock:
        key = next((key for key, found in _shared.items() if found.pool is pool), None)
        if key is None:
            return
        _shared[key].users -= 1
        if _shared[key].users:
            return
        del _shared[key]
    pool.close()


def counts() -> PoolCounts:
    """Return statistics of all pools of this process."""
    with _lock:
        found = [one.pool.counts for one in _shared.values()]
    return PoolCounts(
        idle=sum(one.idle for one in found),
        busy=sum(one.busy for one in found),
        started=sum(one.started for one in found),
        reused=sum(one.reused for one in found),
        replaced=sum(one.replaced for one in found),
    )
