"""Sandboxes kept ready: started before they are needed, used again, and replaced before they wear out."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rollgym.errors import RollgymError, UsageError
from rollgym.sandbox.open import open_sandbox
from rollgym.sandbox.types import Sandbox, SandboxSettings

DEFAULT_USES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """How a pool is doing."""

    idle: int
    busy: int
    started: int
    """All that were ever started."""
    reused: int
    replaced: int
    """Closed because they were worn out or broken."""


class SandboxPool:
    """Sandboxes of one kind for one process, taken and given back by any of its threads.

    A sandbox that is given back forgets its session. After ``uses`` it is closed; another takes its place.
    A pool belongs to the process that made it: after a fork it is empty.
    """

    def __init__(
        self,
        settings: SandboxSettings | None = None,
        *,
        size: int = 2,
        uses: int = DEFAULT_USES,
        opener: Callable[[SandboxSettings], Sandbox] = open_sandbox,
    ) -> None:
        if size < 1 or uses < 1:
            raise UsageError(f"A pool of sandboxes needs size and uses of at least 1, not {size} and {uses}.")
        self.settings = settings or SandboxSettings()
        self.size, self.uses = size, uses
        self._opener = opener
        self._start_afresh()
        _pools.add(self)

    def _start_afresh(self) -> None:
        self._owner = os.getpid()
        self._free = threading.Condition()
        self._idle: list[tuple[Sandbox, int]] = []
        self._busy: dict[int, tuple[Sandbox, int]] = {}
        self._opening = self._started = self._reused = self._replaced = 0
        self._closed = False

    def warm(self, count: int | None = None) -> None:
        """Start sandboxes until so many (by default all) are there."""
        self._check()
        while True:
            with self._free:
                if self._all() >= min(count or self.size, self.size):
                    return
                self._opening += 1
            self._put(self._open(), 0)

    def take(self, timeout: float | None = None) -> Sandbox:
        """A sandbox with an empty session; waits where all are taken, so many seconds at most."""
        self._check()
        with self._free:
            if not self._free.wait_for(
                lambda: self._closed or self._idle or self._all() < self.size, timeout
            ):
                raise TimeoutError(f"All {self.size} sandboxes of the pool are taken.")
            self._check()
            if self._idle:
                sandbox, used = self._idle.pop()
                self._busy[id(sandbox)] = (sandbox, used)
                self._reused += bool(used)
                return sandbox
            self._opening += 1
        sandbox = self._open()
        with self._free:
            self._opening -= 1
            self._busy[id(sandbox)] = (sandbox, 0)
        return sandbox

    def give(self, sandbox: Sandbox) -> None:
        """Give a sandbox back. A broken one is noticed and closed."""
        with self._free:
            entry = self._busy.get(id(sandbox))
            if entry is None:
                raise UsageError("This sandbox was not taken from this pool, or was given back already.")
        used = entry[1] + 1
        worn = self._closed or used >= self.uses or not _reset(sandbox)
        if worn:
            sandbox.close()
        with self._free:
            del self._busy[id(sandbox)]
            if worn:
                self._replaced += 1
            else:
                self._idle.append((sandbox, used))
            self._free.notify()

    @contextlib.contextmanager
    def borrow(self, timeout: float | None = None) -> Iterator[Sandbox]:
        """A sandbox for the length of a ``with`` block."""
        sandbox = self.take(timeout)
        try:
            yield sandbox
        finally:
            self.give(sandbox)

    @property
    def counts(self) -> PoolCounts:
        """How many there are, and were."""
        with self._free:
            return PoolCounts(
                idle=len(self._idle),
                busy=len(self._busy),
                started=self._started,
                reused=self._reused,
                replaced=self._replaced,
            )

    def close(self) -> None:
        """Close all sandboxes, also those that are taken. May be called twice."""
        with self._free:
            self._closed = True
            rest = [sandbox for sandbox, _ in (*self._idle, *self._busy.values())]
            self._idle.clear()
            self._free.notify_all()
        # After a fork they are the parent's.
        if self._owner == os.getpid():
            for sandbox in rest:
                sandbox.close()

    def _all(self) -> int:
        return len(self._idle) + len(self._busy) + self._opening

    def _check(self) -> None:
        if self._owner != os.getpid():
            self._start_afresh()
        if self._closed:
            raise UsageError("The pool of sandboxes is closed.")

    def _open(self) -> Sandbox:
        """Open one that is counted as opening already."""
        try:
            sandbox = self._opener(self.settings)
        except BaseException:
            with self._free:
                self._opening -= 1
                self._free.notify()
            raise
        with self._free:
            self._started += 1
        return sandbox

    def _put(self, sandbox: Sandbox, used: int) -> None:
        with self._free:
            self._opening -= 1
            self._idle.append((sandbox, used))
            self._free.notify()


def _reset(sandbox: Sandbox) -> bool:
    try:
        sandbox.reset()
    except (RollgymError, OSError):
        return False
    return True


_pools: weakref.WeakSet[SandboxPool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_pools):
        pool.close()
