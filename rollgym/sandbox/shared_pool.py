"""Sandbox pools shared by the environments of a process; closed with their last user."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

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
        shared = _shared.get((settings, opener))
        if shared is None:
            pool = SandboxPool(settings, size=None, ahead=AHEAD, opener=opener)
            shared = _shared[settings, opener] = _Shared(pool)
        shared.users += 1
        return shared.pool


def leave(pool: SandboxPool) -> None:
    """Release a shared pool; the last release closes its sandboxes."""
    with _lock:
        key = next((key for key, shared in _shared.items() if shared.pool is pool), None)
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
        counted = [asdict(shared.pool.counts) for shared in _shared.values()]
    return PoolCounts(**{field.name: sum(c[field.name] for c in counted) for field in fields(PoolCounts)})
