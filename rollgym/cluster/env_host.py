"""What runs in an env actor: a pool of the machine it is on."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from rollgym.cluster.mail import Mailbox
from rollgym.pool import EnvSession
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.stats import PoolStats
from rollgym.pool.wire import Act, Begin, End, encode

_asked = msgspec.msgpack.Decoder(Begin | Act | End).decode


class EnvHost(Mailbox):
    """What runs in an env actor."""

    def __init__(self, workers: int, modules: list[str], limits: WorkerLimits, path: list[str]) -> None:
        super().__init__()
        # On the driver's machine modules are found where it finds them; elsewhere there is no such folder.
        sys.path += [folder for folder in path if folder not in sys.path and os.path.isdir(folder)]
        self._make = (workers, modules, limits)
        self._pool: Any = None
        self._sessions: dict[int, EnvSession] = {}

    async def start(self) -> int:
        """Make the pool; returns the process's id."""
        from rollgym.pool.inline import InlinePool
        from rollgym.pool.local import LocalPool

        workers, modules, limits = self._make
        self._pool = LocalPool(workers, modules=modules, limits=limits) if workers else InlinePool(modules)
        return os.getpid()

    async def serve(self, body: bytes) -> bytes | None:
        """Answer what the wire of a local pool would be asked."""
        asked = _asked(body)
        if isinstance(asked, Begin):
            session = await self._pool.open(asked.spec)
            self._sessions[asked.lease] = session
            return encode(await session.reset())
        if isinstance(asked, Act):
            return encode(await self._sessions[asked.lease].step(asked.action))
        session = self._sessions.pop(asked.lease, None)
        if session is not None:
            await session.close()
        return None

    async def stats(self) -> PoolStats:
        """Of the pool inside."""
        found: PoolStats = self._pool.stats()
        return found

    async def close(self) -> None:
        """Stop the pool inside."""
        await self._pool.close()
