"""The env actor: hosts a local pool of environments on its node."""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from rollgym.cluster.rpc import ActorServer
from rollgym.pool.base import EnvSession
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.protocol import Act, Begin, End, encode
from rollgym.pool.stats import PoolStats

_decode = msgspec.msgpack.Decoder(Begin | Act | End).decode


class EnvActor(ActorServer):
    """Hosts a `LocalPool`, or an `InlinePool` without worker processes."""

    def __init__(self, workers: int, modules: list[str], limits: WorkerLimits, path: list[str]) -> None:
        super().__init__()
        # On the driver's machine, find modules where the driver does; other machines lack these folders.
        sys.path += [folder for folder in path if folder not in sys.path and os.path.isdir(folder)]
        self._make = (workers, modules, limits)
        self._pool: Any = None
        self._sessions: dict[int, EnvSession] = {}

    async def start(self) -> int:
        """Create the pool; returns the process id."""
        from rollgym.pool.inline import InlinePool
        from rollgym.pool.local import LocalPool

        workers, modules, limits = self._make
        self._pool = LocalPool(workers, modules=modules, limits=limits) if workers else InlinePool(modules)
        return os.getpid()

    async def serve(self, body: bytes) -> bytes | None:
        """Handle a message of the pool protocol."""
        message = _decode(body)
        if isinstance(message, Begin):
            session = await self._pool.open(message.spec)
            self._sessions[message.lease] = session
            return encode(await session.reset())
        if isinstance(message, Act):
            return encode(await self._sessions[message.lease].step(message.action))
        session = self._sessions.pop(message.lease, None)
        if session is not None:
            await session.close()
        return None

    async def stats(self) -> PoolStats:
        """Return the stats of the pool."""
        stats: PoolStats = self._pool.stats()
        return stats

    async def close(self) -> None:
        """Stop the pool."""
        await self._pool.close()
