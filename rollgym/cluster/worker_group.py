"""Actors of one class that are called together: the ranks of a role."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from rollgym.cluster.errors import ActorLost, need_ray
from rollgym.cluster.heartbeat import OPTIONS, TIMEOUT, Heartbeats, hung, interval
from rollgym.core.errors import RollgymError, RunError, UsageError, one_line

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
_DEAD_SECONDS = 5.0
"""Seconds for the ranks to report whether they are alive, after one of them failed."""
_SMALL = (int, float, str, bool, Path, FunctionType, type(None))


class WorkerGroup(Generic[T]):
    """The ranks of a role.

    Args:
        role: The name of the ranks in messages.
        kind: The actor class; each rank is ``kind(rank, world, *args, **kwargs)``.
        actor_options: Ray options of each rank's actor, such as `ActorSlot.options`; one per rank.
        args: Further arguments of every rank.
        heartbeat_timeout: Seconds without a heartbeat after which a busy rank counts as lost.
        kwargs: Further arguments of every rank.

    Example:
        >>> group = WorkerGroup("critic", Rank, [{"num_cpus": 1}] * 2)
        >>> group.call(Rank.update, batch)  # one result per rank
    """

    def __init__(
        self,
        role: str,
        kind: type[T],
        actor_options: Sequence[Mapping[str, Any]],
        *args: Any,
        heartbeat_timeout: float = TIMEOUT,
        **kwargs: Any,
    ) -> None:
        if not actor_options:
            raise UsageError(f"The role {role} needs at least one rank.")
        self.role = role
        self._kind = need_ray().remote(max_restarts=0, **OPTIONS)(kind)
        self._timeout = heartbeat_timeout
        self._arguments = (args, kwargs)
        self.actor_options = tuple(actor_options)
        """Ray options of each rank's actor."""
        self.actors: list[Any] = []
        self.start()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.actor_options)

    def start(self, actor_options: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Restart all ranks, with other Ray options or another number of ranks where given."""
        self.close()
        self.actor_options = tuple(actor_options or self.actor_options)
        args, kwargs = self._arguments
        self.actors = [
            self._kind.options(**options).remote(rank, self.world, *args, **kwargs)
            for rank, options in enumerate(self.actor_options)
        ]
        self._heartbeats = Heartbeats(self.actors, self._timeout)

    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method of the actor class on all ranks; returns their results by rank."""
        if not self.actors:
            raise RunError(f"The ranks of {self.role} are stopped.")
        stored = [_stored(value, self.world) for value in args]
        named = {name: _stored(value, self.world) for name, value in kwargs.items()}
        refs = [getattr(actor, method.__name__).remote(*stored, **named) for actor in self.actors]
        return self._collect(dict(enumerate(refs)))

    def call_one(
        self, rank: int, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a method of the actor class on one rank."""
        result: R = self._collect(
            {rank: getattr(self.actors[rank], method.__name__).remote(*args, **kwargs)}
        )[0]
        return result

    def stream(
        self, method: Callable[Concatenate[T, P], Iterator[Any]], *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[tuple[list[Any], list[Any]]]:
        """Call a method on all ranks that yields an object and a summary of it, in turn, any number of times.

        Yields references to the objects, which stay where they are, and the summaries, both by rank, as soon
        as all ranks have yielded both.
        """
        if not self.actors:
            raise RunError(f"The ranks of {self.role} are stopped.")
        ray = need_ray()
        name = method.__name__
        generators = [getattr(actor, name).remote(*args, **kwargs) for actor in self.actors]
        while True:
            refs = self._next(generators)
            if all(ref is None for ref in refs):
                return
            summaries = []
            for rank, ref in enumerate(self._next(generators)):
                with self._find_dead_rank(), _name_rank(self.role, rank):
                    if ref is None:
                        if refs[rank] is not None:  # the error, in place of an object
                            ray.get(refs[rank])
                        raise RunError(f"{self.role} rank {rank} stopped before the others.")
                    summaries.append(ray.get(ref))
            yield refs, summaries

    def close(self) -> None:
        """Stop all ranks."""
        ray = need_ray()
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []

    def _collect(self, refs: Mapping[int, Any]) -> list[Any]:
        """Fetch results as they arrive: a lost rank is noticed while others wait for it forever."""
        ray = need_ray()
        ranks = {ref: rank for rank, ref in refs.items()}
        results: dict[int, Any] = {}
        left = list(refs.values())
        while left:
            ready, left = ray.wait(left, timeout=interval(self._timeout))
            if not ready:
                self._check_hung()
            for ref in ready:
                with self._find_dead_rank(), _name_rank(self.role, ranks[ref]):
                    results[ranks[ref]] = ray.get(ref)
                self._heartbeats.heard(ranks[ref])
        return [results[rank] for rank in refs]

    def _next(self, generators: Sequence[Any]) -> list[Any]:
        """Return a reference to the next object of each rank; ``None`` after the last."""
        ray = need_ray()
        found = []
        for rank, generator in enumerate(generators):
            while not ray.wait([generator], timeout=interval(self._timeout), fetch_local=False)[0]:
                self._check_hung()
            found.append(next(generator, None))
            self._heartbeats.heard(rank)
        return found

    def _check_hung(self) -> None:
        rank = self._heartbeats.look()
        if rank is not None:
            need_ray().kill(self.actors[rank])
            raise ActorLost(f"{self.role} rank {rank} is lost: {hung(self._timeout)}", self.role, rank)

    @contextmanager
    def _find_dead_rank(self) -> Iterator[None]:
        """Raise the death of a rank instead of the errors of ranks that it left waiting."""
        try:
            yield
        except ActorLost:
            raise
        except RunError as error:
            if self.world > 1:
                self._check_dead(error)
            raise

    def _check_dead(self, error: RunError) -> None:
        ray = need_ray()
        refs = [actor.__ray_ready__.remote() for actor in self.actors]
        # Dead ranks fail at once; live ones may be busy.
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=_DEAD_SECONDS)
        for rank, ref in enumerate(refs):
            if ref in ready:
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as death:
                    raise ActorLost.of(self.role, rank, death) from error


@contextmanager
def _name_rank(role: str, rank: int) -> Iterator[None]:
    """Name the rank in its errors: its death is `ActorLost`; a `RollgymError` is raised as it is."""
    ray = need_ray()
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RollgymError):
            raise cause from error
        if isinstance(cause, ray.exceptions.RayError):  # a call that it made to another actor
            raise ActorLost.of(role, rank, cause) from error
        raise RunError(f"{role} rank {rank} failed: {one_line(cause or error)}") from error
    except ray.exceptions.RayError as error:
        raise ActorLost.of(role, rank, error) from error


def _stored(value: Any, world: int) -> Any:
    """Return a reference to a value that may be large: it is stored once, instead of sent to each rank."""
    return value if world == 1 or isinstance(value, _SMALL) else need_ray().put(value)
