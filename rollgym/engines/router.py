"""Router over replicas: a session stays on one replica, a new session goes to the least loaded one.

A session whose replica sleeps moves to one that is awake with its next request; requests that the replica has
already begun wait until it wakes up.
A lost replica is taken out of rotation: its requests fail with `EngineLost` and its sessions move to other
replicas. The router calls its `Engine.reconnect` with exponential backoff and readmits it once it has the
same weights as the others. Single replicas can `sleep` while another role uses their device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollgym.core.errors import AgentError, EngineLost, RollgymError, UsageError, one_line
from rollgym.engines.base import (
    MEMORY_TAGS,
    Engine,
    EngineStats,
    GenerateRequest,
    Generation,
    OnToken,
    WeightSource,
    as_engine,
)

__all__ = ["RoutedEngine", "gather"]

FIRST_RETRY = 1.0
MAX_RETRY = 30.0
"""Seconds between two attempts to reconnect a lost replica; doubled after each failure."""
POLL = 0.05
"""Seconds between two checks for a reconnected replica while all are lost."""


@dataclass(slots=True, eq=False)
class _Replica:
    engine: Engine
    number: int
    in_flight: int = 0
    sampled_tokens: int = 0
    sessions: set[str] = field(default_factory=set)
    lost: str = ""
    """Why it is out of rotation; empty if it is not."""
    asleep: bool = False
    reconnecting: asyncio.Task[None] | None = None

    @property
    def load(self) -> tuple[int, int, int]:
        return self.in_flight, len(self.sessions), self.number


class RoutedEngine(Engine):
    """An `Engine` over replicas that have the same model and the same weights."""

    def __init__(self, engines: Sequence[Engine], *, patience: float = 0.0) -> None:
        """Route over ``engines``.

        Args:
            engines: The replicas.
            patience: Seconds to wait for a replica to reconnect while all are lost.
        """
        if not engines:
            raise UsageError("RoutedEngine needs at least one engine.")
        self._patience = patience
        self._replicas = [_Replica(as_engine(engine), number) for number, engine in enumerate(engines)]
        self._replica_of: dict[str, _Replica] = {}
        """The replica of each session."""
        self._updating = False
        self._version = engines[0].version
        if mismatch := self._mismatch():
            raise UsageError(f"The replicas have weights of different versions: {mismatch}.")

    @property
    def version(self) -> int:
        """Version of the weights of all replicas in rotation."""
        return self._version

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and reply together that every replica supports."""
        return min(replica.engine.context_length for replica in self._replicas)

    @property
    def num_replicas(self) -> int:
        """Number of replicas, lost ones included."""
        return len(self._replicas)

    @property
    def sampled_tokens(self) -> tuple[int, ...]:
        """Tokens of the replies so far, by replica."""
        return tuple(replica.sampled_tokens for replica in self._replicas)

    @property
    def weight_dtype(self) -> str:
        """The dtype of all replicas; float32 if they differ."""
        dtypes = {replica.engine.weight_dtype for replica in self._replicas}
        return dtypes.pop() if len(dtypes) == 1 else "float32"

    @property
    def weight_route(self) -> str:
        """The routes of the replicas."""
        return ", ".join(sorted({replica.engine.weight_route for replica in self._replicas}))

    @property
    def weight_bytes_sent(self) -> int | None:
        """Bytes of the last weight update to the replica that got most; ``None``: all got all weights."""
        sent = [replica.engine.weight_bytes_sent for replica in self._replicas]
        return None if None in sent else max(filter(None, sent), default=0)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The replicas, lost ones included."""
        return tuple(replica.engine for replica in self._replicas)

    @property
    def loads(self) -> tuple[int, ...]:
        """Number of requests in flight on each replica."""
        return tuple(replica.in_flight for replica in self._replicas)

    @property
    def lost(self) -> dict[int, str]:
        """The replicas out of rotation, with the reason."""
        return {replica.number: replica.lost for replica in self._replicas if replica.lost}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply on the replica of the session."""
        return await self._on_replica(request, lambda engine: engine.generate(request))

    async def stream(self, request: GenerateRequest, on_token: OnToken) -> Generation:
        """Sample one reply on the replica of the session, and pass on its tokens as they are sampled."""
        return await self._on_replica(request, lambda engine: engine.stream(request, on_token))

    async def _on_replica(
        self, request: GenerateRequest, work: Callable[[Engine], Awaitable[Generation]]
    ) -> Generation:
        await self._wait_for_replica()
        await self._leave_sleeping(request.session)
        replica = self._route(request.session)
        replica.in_flight += 1
        try:
            reply = await work(replica.engine)
            replica.sampled_tokens += len(reply.token_ids)
            return reply
        except EngineLost as error:
            self._mark_lost(replica, str(error))
            raise
        finally:
            replica.in_flight -= 1

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these replies now, on whichever replica they run."""
        await self._each(lambda replica: replica.engine.abort(request_ids))

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Send new weights to all replicas, including sleeping and reconnected ones."""
        weights = await asyncio.to_thread(gather, weights, self.weight_dtype)
        until = asyncio.get_running_loop().time() + self._patience
        while True:
            await self._wait_for_replica(have_weights=True)
            try:
                reconnected = await self._send_weights(version, weights)
                break
            except EngineLost:
                if asyncio.get_running_loop().time() >= until:
                    raise
                await asyncio.sleep(POLL)
        for replica in reconnected:
            self._readmit(replica)
        if mismatch := self._mismatch():
            raise AgentError(f"The replicas have weights of different versions: {mismatch}.")

    async def _send_weights(self, version: int, weights: WeightSource) -> list[_Replica]:
        """Send weights to all reachable replicas; returns those that were lost and have reconnected."""

        async def send(replica: _Replica) -> None:
            await replica.engine.update_weights(version, weights)
            updated.append(replica)

        updated: list[_Replica] = []
        self._updating = True  # a replica that reconnects meanwhile must not serve the old weights
        try:
            reconnected = self._reconnected()
            await self._each(send, also=reconnected)
            while late := [replica for replica in self._reconnected() if replica not in reconnected]:
                reconnected += late
                await self._each(send, only=late)
            if not updated:
                raise EngineLost(f"All {len(self._replicas)} replicas were lost during a weight update.")
            self._version = version
        finally:
            self._updating = False
        return reconnected

    async def sleep(self, tags: Sequence[str] = MEMORY_TAGS, *, replicas: Sequence[int] | None = None) -> int:
        """Put replicas to sleep: requests that they have begun wait. Returns bytes freed."""
        freed = 0
        for number in range(len(self._replicas)) if replicas is None else replicas:
            replica = self._replicas[number]
            replica.asleep = True
            await self._guarded(replica, lambda one: one.engine.pause())
            if tags:
                with suppress(EngineLost):  # a lost replica has no memory to free
                    freed += await replica.engine.sleep(tags)
        return freed

    async def wake_up(self, *, replicas: Sequence[int] | None = None) -> None:
        """Wake up replicas; default all."""
        for number in range(len(self._replicas)) if replicas is None else replicas:
            replica = self._replicas[number]
            await self._guarded(replica, lambda one: one.engine.wake_up())
            replica.asleep = False

    async def stats(self) -> EngineStats:
        """Sums over the replicas in rotation."""
        stats = [await replica.engine.stats() for replica in self._replicas if not replica.lost]
        names = EngineStats.__dataclass_fields__
        return EngineStats(**{name: sum(getattr(one, name) for one in stats) for name in names})

    def set_replicas(self, engines: Sequence[Engine]) -> None:
        """Replace the replicas: new ones join once they have weights, missing ones are dropped."""
        known = {id(replica.engine): replica for replica in self._replicas}
        kept = []
        for number, engine in enumerate(engines):
            replica = known.pop(id(engine), None) or _new_replica(engine)
            replica.number, replica.asleep = number, False
            kept.append(replica)
        for removed in known.values():
            self._mark_lost(removed, "it was removed from the router", reconnect=False)
        self._replicas = kept

    async def pause(self) -> None:
        """Stop generating until `resume`; requests wait."""
        await self._each(lambda replica: replica.engine.pause())

    async def resume(self) -> None:
        """Continue, except for sleeping replicas."""
        await self._each(lambda replica: _nothing() if replica.asleep else replica.engine.resume())

    async def forget(self, session: str) -> None:
        """Drop the KV cache of a session that has ended."""
        replica = self._replica_of.pop(session, None)
        if replica is not None:
            replica.sessions.discard(session)
            if not replica.lost:
                await self._guarded(replica, lambda one: one.engine.forget(session))

    async def close(self) -> None:
        """Close all replicas, lost ones included."""
        for replica in self._replicas:
            if replica.reconnecting is not None:
                replica.reconnecting.cancel()
        results = await asyncio.gather(
            *(replica.engine.close() for replica in self._replicas), return_exceptions=True
        )
        for replica, result in zip(self._replicas, results, strict=True):
            if isinstance(result, BaseException) and not (replica.lost and isinstance(result, AgentError)):
                raise result

    async def _leave_sleeping(self, session: str) -> None:
        """Release a session from a sleeping replica if another one is awake, so that it need not wait."""
        replica = self._replica_of.get(session)
        if replica is None or replica.lost or not replica.asleep:
            return
        if all(one.lost or one.asleep for one in self._replicas):
            return
        del self._replica_of[session]
        replica.sessions.discard(session)
        await self._guarded(replica, lambda one: one.engine.forget(session))

    def _route(self, session: str) -> _Replica:
        """Return the replica of a session, or assign the least loaded one."""
        known = self._replica_of.get(session)
        if known is not None and not known.lost:
            return known
        alive = self._alive()
        replica = min([one for one in alive if not one.asleep] or alive, key=lambda one: one.load)
        if session:
            self._replica_of[session] = replica
            replica.sessions.add(session)
        return replica

    def _alive(self) -> list[_Replica]:
        alive = [one for one in self._replicas if not one.lost]
        if not alive:
            last = self._replicas[-1].lost if self._replicas else "they are being replaced"
            raise EngineLost(f"All {len(self._replicas)} replicas are lost; the last error was: {last}")
        return alive

    async def _wait_for_replica(self, *, have_weights: bool = False) -> None:
        """While all replicas are lost, wait up to ``patience`` seconds for one to reconnect.

        Args:
            have_weights: New weights are available, so a reconnected replica need not have the current ones.
        """
        until = asyncio.get_running_loop().time() + self._patience
        while all(replica.lost for replica in self._replicas):
            tasks = [one.reconnecting for one in self._replicas if one.reconnecting is not None]
            if have_weights and any(task.done() for task in tasks):
                return
            if asyncio.get_running_loop().time() > until or (self._replicas and not tasks):
                return
            await asyncio.sleep(POLL)

    def _mark_lost(self, replica: _Replica, reason: str, *, reconnect: bool = True) -> None:
        if not reconnect and replica.reconnecting is not None:
            replica.reconnecting.cancel()
        if replica.lost:
            return
        replica.lost = reason or "no reason given"
        for session in replica.sessions:
            self._replica_of.pop(session, None)
        replica.sessions.clear()
        if reconnect:
            replica.reconnecting = asyncio.create_task(self._reconnect(replica))

    async def _reconnect(self, replica: _Replica) -> None:
        """Retry until a lost replica is back. With other weights it waits for the next update."""
        delay = FIRST_RETRY
        while True:
            with suppress(RollgymError):
                if not await replica.engine.reconnect():
                    replica.reconnecting = None
                    return
                break
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY)
        if not self._updating:
            self._readmit(replica)

    def _reconnected(self) -> list[_Replica]:
        """The lost replicas that have reconnected and wait for weights."""
        return [one for one in self._replicas if one.lost and one.reconnecting and one.reconnecting.done()]

    def _readmit(self, replica: _Replica) -> None:
        """Put a reconnected replica back into rotation if it has the current weights."""
        if replica.engine.version == self._version:
            replica.lost, replica.reconnecting = "", None

    async def _guarded(self, replica: _Replica, do: Callable[[_Replica], Awaitable[Any]]) -> None:
        """Call ``do`` with a replica; if it is lost meanwhile, take it out of rotation without raising."""
        try:
            await do(replica)
        except EngineLost as error:
            self._mark_lost(replica, str(error))

    async def _each(
        self,
        do: Callable[[_Replica], Awaitable[Any]],
        *,
        also: Sequence[_Replica] = (),
        only: Sequence[_Replica] = (),
    ) -> None:
        """Call ``do`` with every replica in rotation and ``also`` with others, or with ``only`` some.

        At least one replica must be in rotation before and after, unless ``also`` or ``only`` is given.
        """
        explicit = bool(also or only)
        chosen = only or [
            *([one for one in self._replicas if not one.lost] if explicit else self._alive()),
            *also,
        ]
        results = await asyncio.gather(*(self._guarded(one, do) for one in chosen), return_exceptions=True)
        failed = {
            one.number: result
            for one, result in zip(chosen, results, strict=True)
            if isinstance(result, BaseException)
        }
        for number, error in failed.items():
            if len(failed) < len(chosen) and isinstance(error, RollgymError):
                raise AgentError(f"Only replica {number} failed: {one_line(error)}") from error
            raise error
        if not explicit:
            self._alive()

    def _mismatch(self) -> str:
        """Describe the weight versions of the replicas if they differ from that of the router."""
        alive = [one for one in self._replicas if not one.lost]
        if all(one.engine.version == self._version for one in alive):
            return ""
        return ", ".join(f"replica {one.number} has {one.engine.version}" for one in alive)


async def _nothing() -> None:
    return


def _new_replica(engine: Engine) -> _Replica:
    """Return a replica that joins with the next weights."""
    return _Replica(engine, 0, lost="it has no weights yet", reconnecting=asyncio.create_task(_nothing()))


def gather(weights: WeightSource, dtype: str = "float32") -> WeightSource:
    """Collect weights that come in buckets into tensors in host memory; return others unchanged."""
    if weights.buckets is None:
        return weights
    from rollgym.engines.weight_sync.wire import to_wire

    tensors = {name: to_wire(tensor, dtype) for bucket in weights.buckets() for name, tensor in bucket}
    return WeightSource(tensors=tensors)
