"""Several actors of one class that work as one: the ranks of a role."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollgym.cluster.errors import ActorLost, need_ray
from rollgym.cluster.heartbeat import OPTIONS, TIMEOUT, Pulses, hung, interval
from rollgym.errors import RollgymError, RunError, UsageError, one_line

_DEAD_SECONDS = 5.0
"""For the ranks to say whether they live, after one of them failed."""
_SMALL = (int, float, str, bool, Path, type(None))


class ParallelWorker:
    """The ranks of a role.

    Args:
        role: What they are called in messages.
        kind: The class; each rank is ``kind(rank, world, *args, **kwargs)``.
        places: Options for each rank's actor, such as `Seat.options`; as many ranks as there are.
        heartbeat_timeout: Seconds without a sign of life after which a rank that works counts as lost.
        args: For all ranks alike.
        kwargs: The same.
    """

    def __init__(
        self,
        role: str,
        kind: type,
        places: Sequence[Mapping[str, Any]],
        *args: Any,
        heartbeat_timeout: float = TIMEOUT,
        **kwargs: Any,
    ) -> None:
        if not places:
            raise UsageError(f"The role {role} needs at least one place.")
        self.role = role
        self._kind = need_ray().remote(max_restarts=0, **OPTIONS)(kind)
        self._timeout = heartbeat_timeout
        self._arguments = (args, kwargs)
        self._places = tuple(places)
        self.actors: list[Any] = []
        self.start()

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self._places)

    @property
    def places(self) -> Sequence[Mapping[str, Any]]:
        """Where they are."""
        return self._places

    def start(self, places: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Start all ranks anew, elsewhere or in other numbers where places are given."""
        self.close()
        self._places = tuple(places or self._places)
        args, kwargs = self._arguments
        self.actors = [
            self._kind.options(**place).remote(rank, self.world, *args, **kwargs)
            for rank, place in enumerate(self._places)
        ]
        self._pulses = Pulses(self.actors, self._timeout)

    # Calls that wait.

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """All ranks do the same; their answers by rank."""
        args, kwargs = _stored(args, kwargs, self.world)
        return self._collect(self._send(method, [args] * self.world, kwargs))

    def call_sharded(self, method: str, shards: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Each rank gets its shard first, then what all get."""
        return self._collect(self._send_shards(method, shards, args, kwargs))

    def call_one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """One rank does something."""
        ref = getattr(self.actors[rank], method).remote(*args, **kwargs)
        return self._collect({rank: ref})[0]

    # The same, to be awaited.

    async def acall(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`call` in an event loop."""
        args, kwargs = _stored(args, kwargs, self.world)
        return await self._gather(self._send(method, [args] * self.world, kwargs))

    async def acall_sharded(self, method: str, shards: Sequence[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`call_sharded` in an event loop."""
        return await self._gather(self._send_shards(method, shards, args, kwargs))

    async def acall_one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """`call_one` in an event loop."""
        ref = getattr(self.actors[rank], method).remote(*args, **kwargs)
        return (await self._gather({rank: ref}))[0]

    def close(self) -> None:
        """End all ranks."""
        ray = need_ray()
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    def _send(self, method: str, args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]) -> dict[int, Any]:
        if not self.actors:
            raise RunError(f"The ranks of {self.role} are stopped.")
        return {
            rank: getattr(actor, method).remote(*args[rank], **kwargs)
            for rank, actor in enumerate(self.actors)
        }

    def _send_shards(
        self, method: str, shards: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[int, Any]:
        if len(shards) != self.world:
            raise UsageError(f"{self.role} has {self.world} ranks, but there are {len(shards)} shards.")
        args, kwargs = _stored(args, kwargs, self.world)
        return self._send(method, [(shard, *args) for shard in shards], kwargs)

    def _collect(self, refs: Mapping[int, Any]) -> list[Any]:
        """Answers as they come: one who is lost is noticed while others wait for it and never answer."""
        ray = need_ray()
        ranks = {ref: rank for rank, ref in refs.items()}
        found: dict[int, Any] = {}
        left = list(refs.values())
        while left:
            ready, left = ray.wait(left, timeout=interval(self._timeout))
            if not ready:
                self._look_for_hung()
            for ref in ready:
                with self._blamed(), _named(self.role, ranks[ref]):
                    found[ranks[ref]] = ray.get(ref)
                self._pulses.heard(ranks[ref])
        return [found[rank] for rank in refs]

    async def _gather(self, refs: Mapping[int, Any]) -> list[Any]:
        async def one(rank: int, ref: Any) -> Any:
            with _named(self.role, rank):
                found = await ref
            self._pulses.heard(rank)
            return found

        tasks = [asyncio.ensure_future(one(rank, ref)) for rank, ref in refs.items()]
        try:
            with self._blamed():
                answers = asyncio.gather(*tasks)
                while not (await asyncio.wait([answers], timeout=interval(self._timeout)))[0]:
                    self._look_for_hung()
                return list(await answers)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _look_for_hung(self) -> None:
        rank = self._pulses.look()
        if rank is not None:
            need_ray().kill(self.actors[rank])
            raise ActorLost(f"{self.role} rank {rank} is gone: {hung(self._timeout)}", self.role, rank)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Where a rank died, others may fail first because it left them: its death is what is raised."""
        try:
            yield
        except ActorLost:
            raise
        except RunError as error:
            if self.world > 1:
                self._look_for_dead(error)
            raise

    def _look_for_dead(self, error: RunError) -> None:
        ray = need_ray()
        asked = [actor.__ray_ready__.remote() for actor in self.actors]
        # The dead say so at once; the living may be busy.
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_DEAD_SECONDS)
        for rank, ref in enumerate(asked):
            if ref in ready:
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as death:
                    raise ActorLost.of(self.role, rank, death) from error


@contextmanager
def _named(role: str, rank: int) -> Iterator[None]:
    """Name what came of a rank: its death is `ActorLost`; an error of its work stays what it was."""
    ray = need_ray()
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RollgymError):
            raise cause from error
        if isinstance(cause, ray.exceptions.RayError):  # what it asked of another actor
            raise ActorLost.of(role, rank, cause) from error
        raise RunError(f"{role} rank {rank} failed: {one_line(cause or error)}") from error
    except ray.exceptions.RayError as error:
        raise ActorLost.of(role, rank, error) from error


def _stored(
    args: tuple[Any, ...], kwargs: dict[str, Any], world: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that may be large as references: they are sent once, and not to each rank."""
    if world == 1:
        return args, kwargs
    return tuple(map(_store, args)), {name: _store(value) for name, value in kwargs.items()}


def _store(value: Any) -> Any:
    return value if isinstance(value, _SMALL) else need_ray().put(value)
