"""The pool without workers: environments live in this process. For small runs, tests and debugging."""

from __future__ import annotations

from collections.abc import Iterable

from rollgym.pool import Reset, Step
from rollgym.pool.host import Hosted, Shelf, kind_of
from rollgym.pool.stats import PoolStats
from rollgym.registry import import_module
from rollgym.types import EpisodeSpec


class InlinePool:
    """Runs environments in the calling process; a blocking step blocks everybody."""

    def __init__(self, modules: Iterable[str] = ()) -> None:
        for module in modules:
            import_module(module)
        self._shelf: Shelf[Hosted] = Shelf()
        self._leased: dict[int, Hosted] = {}
        self._opened = 0

    async def open(self, spec: EpisodeSpec) -> InlineSession:
        """A lease on an environment in this process."""
        hosted = self._shelf.take(kind_of(spec)) or Hosted(spec)
        self._leased[id(hosted)] = hosted
        self._opened += 1
        return InlineSession(self, hosted, spec)

    async def close(self) -> None:
        """Close every environment."""
        for hosted in (*self._leased.values(), *self._shelf.clear()):
            hosted.close()
        self._leased.clear()

    def stats(self) -> PoolStats:
        """Leases in use and episodes so far."""
        return PoolStats(leases=len(self._leased), episodes=self._opened - len(self._leased))

    def release(self, hosted: Hosted, healthy: bool) -> None:
        """Take an environment back; one whose episode failed is thrown away, others are reused."""
        if self._leased.pop(id(hosted), None) is None:
            return  # the pool was closed meanwhile
        unwanted = self._shelf.put(hosted) if healthy else hosted
        if unwanted is not None:
            unwanted.close()


class InlineSession:
    """One lease of an `InlinePool`."""

    def __init__(self, pool: InlinePool, hosted: Hosted, spec: EpisodeSpec) -> None:
        self._pool = pool
        self._hosted = hosted
        self._spec = spec
        self._healthy = True
        self._open = True

    async def reset(self) -> Reset:
        """Start the episode."""
        self._healthy = False
        result = self._hosted.begin(self._spec)
        self._healthy = True
        return result

    async def step(self, action: str) -> Step:
        """Play one action."""
        self._healthy = False
        result = self._hosted.step(action)
        self._healthy = True
        return result

    async def close(self) -> None:
        """Give the environment back."""
        if self._open:
            self._open = False
            self._pool.release(self._hosted, self._healthy)
