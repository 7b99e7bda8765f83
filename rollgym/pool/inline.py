"""The pool without workers: environments live in this process. For small runs, tests and debugging."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from rollgym.errors import EnvError
from rollgym.pool import Reset, Step
from rollgym.pool.host import EnvHost
from rollgym.types import EpisodeSpec


class InlinePool:
    """Runs environments in the calling process; a blocking step blocks everybody."""

    def __init__(self, modules: Iterable[str] = ()) -> None:
        self._host = EnvHost(modules)
        self._numbers = itertools.count()

    async def open(self, spec: EpisodeSpec) -> InlineSession:
        """A lease on an environment in this process."""
        lease = next(self._numbers)
        self._host.open(lease, spec)
        return InlineSession(self._host, lease)

    async def close(self) -> None:
        """Close every environment."""
        self._host.close()


class InlineSession:
    """One lease of an `InlinePool`."""

    def __init__(self, host: EnvHost, lease: int) -> None:
        self._host = host
        self._lease = lease
        self._healthy = True
        self._open = True

    async def reset(self) -> Reset:
        """Start the episode."""
        try:
            return self._host.reset(self._lease)
        except EnvError:
            self._healthy = False
            raise

    async def step(self, action: str) -> Step:
        """Play one action."""
        try:
            return self._host.step(self._lease, action)
        except EnvError:
            self._healthy = False
            raise

    async def close(self) -> None:
        """Give the environment back."""
        if self._open:
            self._open = False
            self._host.release(self._lease, self._healthy)
