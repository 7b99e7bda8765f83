"""Several engines as one: each session stays with one of them, and new ones go where there is least to do.

An engine that is lost is left out; what it was doing fails as `EngineLost`, and its sessions go on elsewhere.
Where it has a method ``ready`` (as `SglangEngine`), it is tried again, and takes part once it has the same
weights as the others. Single replicas can be suspended, for a machine that something else needs for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollgym.engines import Engine, GenerateRequest, Generation, WeightSource
from rollgym.errors import AgentError, EngineLost, RollgymError, UsageError, one_line

__all__ = ["ReplicaEngine", "gather"]

FIRST_TRY = 1.0
LONGEST_TRY = 30.0
"""Seconds until a lost replica is tried again, doubled each time."""
POLL = 0.05
"""Seconds between two looks for one that is found again, where all are lost."""


@dataclass(slots=True, eq=False)
class _Replica:
    engine: Engine
    number: int
    in_flight: int = 0
    sessions: set[str] = field(default_factory=set)
    lost: str = ""
    """Why it takes no part."""
    suspended: bool = False
    search: asyncio.Task[None] | None = None

    @property
    def load(self) -> tuple[int, int, int]:
        return self.in_flight, len(self.sessions), self.number


class ReplicaEngine:
    """An `Engine` over several that have the same model and the same weights."""

    def __init__(self, engines: Sequence[Engine], *, patience: float = 0.0) -> None:
        """Over these engines; ``patience``: seconds to wait for one to be found again where all are lost."""
        if not engines:
            raise UsageError("A replica engine needs at least one engine.")
        self._patience = patience
        self._replicas = [_Replica(engine, number) for number, engine in enumerate(engines)]
        self._homes: dict[str, _Replica] = {}
        self._updating = False
        self._version = engines[0].version
        if mismatch := self._mismatch():
            raise UsageError(f"The replicas have weights of different versions: {mismatch}.")

    @property
    def version(self) -> int:
        """Of the weights in use, which all that take part have."""
        return self._version

    @property
    def context_length(self) -> int:
        """The longest prompt and reply together that every replica takes."""
        return min(one.engine.context_length for one in self._replicas)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The replicas, lost ones included."""
        return tuple(one.engine for one in self._replicas)

    @property
    def loads(self) -> tuple[int, ...]:
        """Requests in flight at each."""
        return tuple(one.in_flight for one in self._replicas)

    @property
    def lost(self) -> dict[int, str]:
        """The replicas that take no part, and why."""
        return {one.number: one.lost for one in self._replicas if one.lost}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Draw one reply, where the session is at home."""
        await self._some()
        replica = self._place(request.session)
        replica.in_flight += 1
        try:
            return await replica.engine.generate(request)
        except EngineLost as error:
            self._leave_out(replica, str(error))
            raise
        finally:
            replica.in_flight -= 1

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these replies now, wherever they are."""
        await self._each(lambda one: one.engine.abort(request_ids))

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Give all replicas new weights, also suspended ones and those that were lost and found again."""
        weights = await asyncio.to_thread(gather, weights)
        until = asyncio.get_running_loop().time() + self._patience
        while True:
            await self._some(weights=True)
            try:
                back = await self._renew(version, weights)
                break
            except EngineLost:
                if asyncio.get_running_loop().time() >= until:
                    raise
                await asyncio.sleep(POLL)
        for one in back:
            self._readmit(one)
        if mismatch := self._mismatch():
            raise AgentError(f"The replicas have weights of different versions: {mismatch}.")

    async def _renew(self, version: int, weights: WeightSource) -> list[_Replica]:
        """Give all that can be reached new weights; returns those that were lost and found again."""

        async def renew(one: _Replica) -> None:
            await one.engine.update_weights(version, weights)
            renewed.append(one)

        renewed: list[_Replica] = []
        self._updating = True  # one that is found again meanwhile must not take part with the old weights
        try:
            back = self._found()
            await self._each(renew, also=back)
            while late := [one for one in self._found() if one not in back]:
                back += late
                await self._each(renew, only=late)
            if not renewed:
                raise EngineLost(f"All {len(self._replicas)} replicas were lost in an update of the weights.")
            self._version = version
        finally:
            self._updating = False
        return back

    async def suspend(self, number: int) -> None:
        """Pause one replica: sessions at home there wait, new ones go elsewhere."""
        replica = self._replicas[number]
        replica.suspended = True
        await self._guarded(replica, lambda one: one.engine.pause())

    async def restore(self, number: int) -> None:
        """Let a suspended replica go on."""
        replica = self._replicas[number]
        await self._guarded(replica, lambda one: one.engine.resume())
        replica.suspended = False

    def rearrange(self, engines: Sequence[Engine]) -> None:
        """Go on with these: ones that are new take part once they have weights; others are let go."""
        known = {id(one.engine): one for one in self._replicas}
        kept = []
        for number, engine in enumerate(engines):
            replica = known.pop(id(engine), None) or _new(engine)
            replica.number, replica.suspended = number, False
            kept.append(replica)
        for gone in known.values():
            self._leave_out(gone, "it is no longer part of this", search=False)
        self._replicas = kept

    async def pause(self) -> None:
        """Generate nothing until `resume`; requests wait."""
        await self._each(lambda one: one.engine.pause())

    async def release(self, *, weights: bool = True) -> None:
        """Pause, and give up the memory of keys and values and, unless told otherwise, of the weights."""
        await self._each(lambda one: _release(one.engine, weights=weights))

    async def resume(self) -> None:
        """Go on, except those that are suspended."""
        await self._each(lambda one: _nothing() if one.suspended else one.engine.resume())

    async def forget(self, session: str) -> None:
        """Drop what is kept for a session that has ended."""
        replica = self._homes.pop(session, None)
        if replica is not None:
            replica.sessions.discard(session)
            if not replica.lost:
                await self._guarded(replica, lambda one: one.engine.forget(session))

    async def close(self) -> None:
        """Close all, lost ones included."""
        for one in self._replicas:
            if one.search is not None:
                one.search.cancel()
        results = await asyncio.gather(
            *(one.engine.close() for one in self._replicas), return_exceptions=True
        )
        for one, result in zip(self._replicas, results, strict=True):
            if isinstance(result, BaseException) and not (one.lost and isinstance(result, AgentError)):
                raise result

    def _place(self, session: str) -> _Replica:
        """Where a session is at home, or the replica with least to do."""
        home = self._homes.get(session)
        if home is not None and not home.lost:
            return home
        alive = self._alive()
        replica = min([one for one in alive if not one.suspended] or alive, key=lambda one: one.load)
        if session:
            self._homes[session] = replica
            replica.sessions.add(session)
        return replica

    def _alive(self) -> list[_Replica]:
        alive = [one for one in self._replicas if not one.lost]
        if not alive:
            last = self._replicas[-1].lost if self._replicas else "others take their place"
            raise EngineLost(f"None of the {len(self._replicas)} replicas is left; the last said: {last}")
        return alive

    async def _some(self, *, weights: bool = False) -> None:
        """Where all are lost, wait for one that is looked for, as long as there is patience.

        ``weights``: they are at hand, and one that is found again waits for nothing else.
        """
        until = asyncio.get_running_loop().time() + self._patience
        while all(one.lost for one in self._replicas):
            searches = [one.search for one in self._replicas if one.search is not None]
            if weights and any(search.done() for search in searches):
                return
            if asyncio.get_running_loop().time() > until or (self._replicas and not searches):
                return
            await asyncio.sleep(POLL)

    def _leave_out(self, replica: _Replica, why: str, *, search: bool = True) -> None:
        if not search and replica.search is not None:
            replica.search.cancel()
        if replica.lost:
            return
        replica.lost = why or "it gave no reason"
        for session in replica.sessions:
            self._homes.pop(session, None)
        replica.sessions.clear()
        ready = getattr(replica.engine, "ready", None)
        if ready is not None and search:
            replica.search = asyncio.create_task(self._find(replica, ready))

    async def _find(self, replica: _Replica, ready: Callable[[], Awaitable[None]]) -> None:
        """Try a lost replica until it is back. With other weights it has to wait for the next update."""
        wait = FIRST_TRY
        while True:
            with suppress(RollgymError):
                await ready()
                break
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_TRY)
        if not self._updating:
            self._readmit(replica)

    def _found(self) -> list[_Replica]:
        """The lost replicas that answer again and wait for weights."""
        return [one for one in self._replicas if one.lost and one.search is not None and one.search.done()]

    def _readmit(self, replica: _Replica) -> None:
        """Let a replica that was found again take part, if it has the weights that the others have."""
        if replica.engine.version == self._version:
            replica.lost, replica.search = "", None

    async def _guarded(self, replica: _Replica, do: Callable[[_Replica], Awaitable[Any]]) -> None:
        """Do something with one replica; one that is lost over it is left out, and nobody is told."""
        try:
            await do(replica)
        except EngineLost as error:
            self._leave_out(replica, str(error))

    async def _each(
        self,
        do: Callable[[_Replica], Awaitable[Any]],
        *,
        also: Sequence[_Replica] = (),
        only: Sequence[_Replica] = (),
    ) -> None:
        """Do something with all that take part, or ``only`` some; at least one must be left afterwards."""
        some = bool(also or only)  # further ones, which may be all that there are
        chosen = only or [
            *([one for one in self._replicas if not one.lost] if some else self._alive()),
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
                raise AgentError(f"Replica {number} alone failed: {one_line(error)}") from error
            raise error
        if not some:
            self._alive()

    def _mismatch(self) -> str:
        """The versions by replica, where they are not all that of this engine."""
        alive = [one for one in self._replicas if not one.lost]
        if all(one.engine.version == self._version for one in alive):
            return ""
        return ", ".join(f"replica {one.number} has {one.engine.version}" for one in alive)


async def _nothing() -> None:
    return


def _new(engine: Engine) -> _Replica:
    """One that waits for weights."""
    return _Replica(engine, 0, lost="it has no weights yet", search=asyncio.create_task(_nothing()))


async def _release(engine: Engine, *, weights: bool = True) -> None:
    """Have an engine give up what it can; one that can give up nothing pauses."""
    release = getattr(engine, "release", None)
    await (engine.pause() if release is None else release(weights=weights))


def gather(weights: WeightSource) -> WeightSource:
    """Weights that come in buckets, once and for all: copied into this machine's memory."""
    if weights.buckets is None:
        return weights
    found = {
        name: tensor.detach().to("cpu", copy=True).contiguous()
        for bucket in weights.buckets()
        for name, tensor in bucket
    }
    return WeightSource(tensors=found)
