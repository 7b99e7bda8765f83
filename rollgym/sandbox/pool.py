"""Pool of sandboxes: pre-started, reused, and replaced after a number of uses."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rollgym.core.errors import RollgymError, UsageError
from rollgym.sandbox.client import START_SECONDS
from rollgym.sandbox.factory import open_sandbox
from rollgym.sandbox.types import Level, Sandbox, SandboxSettings

DEFAULT_USES = 200
AT_ONCE = max(4, 2 * (os.cpu_count() or 1))
"""Maximum concurrent short uses; taken sandboxes do not count."""
TURN_SECONDS = 10.0
"""Seconds that a short use waits for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """Statistics of a pool."""

    idle: int
    busy: int
    started: int
    reused: int
    replaced: int
    """Closed after their last use or when broken."""


class Isolation(NamedTuple):
    """Description of a pool's sandboxes."""

    backend: str
    level: Level
    weaknesses: tuple[str, ...]


class SandboxPool:
    """Sandboxes of one kind for one process; thread-safe.

    A returned sandbox discards its session and is closed after ``uses``. After a fork the pool is empty.

    Args:
        settings: Which sandboxes.
        size: Most that are open at once; ``None`` for as many as are asked for. Idle ones that were used are
            then no more than were ever in use at once.
        uses: How often one is taken before it is closed.
        ahead: Number of unused sandboxes kept ready by a background thread after the first was taken.
        opener: How one is opened.
    """

    def __init__(
        self,
        settings: SandboxSettings | None = None,
        *,
        size: int | None = 2,
        uses: int = DEFAULT_USES,
        ahead: int = 0,
        opener: Callable[[SandboxSettings], Sandbox] = open_sandbox,
    ) -> None:
        if (size is not None and size < 1) or uses < 1:
            raise UsageError(f"size and uses must be at least 1, got {size} and {uses}.")
        self.settings = settings or SandboxSettings()
        self.size, self.uses, self.ahead = size, uses, ahead
        self._opener = opener
        self._isolation: Isolation | None = None
        self._start_afresh()
        _pools.add(self)

    def _start_afresh(self) -> None:
        self._free = threading.Condition()
        self._idle: list[tuple[Sandbox, int]] = []
        self._busy: dict[int, tuple[Sandbox, int]] = {}
        self._opening = self._started = self._reused = self._replaced = self._most = 0
        self._closed = self._filling = False
        self._short = threading.BoundedSemaphore(AT_ONCE)

    @property
    def isolation(self) -> Isolation:
        """Describe the sandboxes; starts one if there is none yet."""
        while self._isolation is None:
            self.warm(1)
            with self._free:
                # Another thread may be starting the first.
                self._free.wait_for(lambda: self._isolation or self._closed or not self._opening)
        return self._isolation

    def warm(self, count: int | None = None) -> None:
        """Start sandboxes up to a count (default: the pool's size)."""
        self._check()
        wanted = min(count or self.size or 1, self.size or count or 1)
        while True:
            with self._free:
                if self._all() >= wanted:
                    return
                self._opening += 1
            self._put(self._open())

    def take(self, timeout: float | None = None, *, unused: bool = False) -> Sandbox:
        """Take a sandbox with an empty session; waits up to the timeout while all are taken.

        ``unused``: only one in which nothing has run yet.
        """
        self._check()
        with self._free:
            if not self._free.wait_for(lambda: self._closed or self._idle or self._room(), timeout):
                raise TimeoutError(f"All {self.size} sandboxes of the pool are taken.")
            self._check()
            entry = self._pick(unused)
            if entry is None:
                spent = self._idle.pop(0)[0] if not self._room() else None
                self._replaced += spent is not None
                self._opening += 1
            else:
                self._hand_out(*entry)
        if entry is None:
            if spent is not None:
                spent.close()
            entry = self._open(), 0
            with self._free:
                self._opening -= 1
                self._hand_out(*entry)
        self._fill()
        return entry[0]

    def _pick(self, unused: bool) -> tuple[Sandbox, int] | None:
        """Take an idle sandbox, preferably a used one, so that unused ones remain."""
        rank = sorted(range(len(self._idle)), key=lambda index: bool(self._idle[index][1]))
        if not rank or (unused and self._idle[rank[0]][1]):
            return None
        return self._idle.pop(rank[0] if unused else rank[-1])

    def _hand_out(self, sandbox: Sandbox, used: int) -> None:
        self._busy[id(sandbox)] = (sandbox, used)
        self._reused += bool(used)
        self._most = max(self._most, len(self._busy))

    def _room(self) -> bool:
        return self.size is None or self._all() < self.size

    def give(self, sandbox: Sandbox) -> None:
        """Return a sandbox. A broken one is closed."""
        with self._free:
            entry = self._busy.get(id(sandbox))
            if entry is None:
                raise UsageError("This sandbox was not taken from this pool or was already returned.")
            enough = self.size is None and sum(used > 0 for _, used in self._idle) >= self._most
        used = entry[1] + 1
        worn = self._closed or enough or used >= self.uses or not _reset(sandbox)
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
    def borrow(self, timeout: float | None = None, *, unused: bool = False) -> Iterator[Sandbox]:
        """Provide a sandbox within a ``with`` block."""
        with self.turn():
            sandbox = self.take(timeout, unused=unused)
            try:
                yield sandbox
            finally:
                self.give(sandbox)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for other short uses, so that not every thread starts a sandbox.

        The wait is bounded: slow uses must not block the others.
        """
        short = self._short
        held = short.acquire(timeout=TURN_SECONDS)
        try:
            yield
        finally:
            if held:
                short.release()

    @property
    def counts(self) -> PoolCounts:
        """Return statistics."""
        with self._free:
            return PoolCounts(
                idle=len(self._idle),
                busy=len(self._busy),
                started=self._started,
                reused=self._reused,
                replaced=self._replaced,
            )

    def close(self) -> None:
        """Close all sandboxes, including taken ones. Idempotent."""
        with self._free:
            self._closed = True
            rest = [sandbox for sandbox, _ in (*self._idle, *self._busy.values())]
            self._idle.clear()
            self._free.notify_all()
            # A sandbox that is being started is closed by its starter.
            self._free.wait_for(lambda: not self._opening, START_SECONDS)
        for sandbox in rest:
            sandbox.close()

    def _all(self) -> int:
        return len(self._idle) + len(self._busy) + self._opening

    def _check(self) -> None:
        if self._closed:
            raise UsageError("The pool of sandboxes is closed.")

    def _open(self) -> Sandbox:
        """Open a sandbox that is already counted as opening."""
        try:
            sandbox = self._opener(self.settings)
        except BaseException:
            with self._free:
                self._opening -= 1
                self._free.notify_all()
            raise
        with self._free:
            self._started += 1
            self._isolation = Isolation(sandbox.backend, sandbox.level, sandbox.weaknesses)
            self._free.notify_all()
        return sandbox

    def _put(self, sandbox: Sandbox) -> None:
        with self._free:
            kept = not self._closed
            if kept:
                self._idle.append((sandbox, 0))
        if not kept:
            sandbox.close()
        with self._free:
            self._opening -= 1
            self._free.notify_all()

    def _fill(self) -> None:
        """Keep unused sandboxes ready in the background."""
        with self._free:
            if self._filling or not self._lacking():
                return
            self._filling = True
        threading.Thread(target=self._filler, name="sandboxes ahead", daemon=True).start()

    def settle(self) -> None:
        """Wait until the ready sandboxes have started."""
        with self._free:
            self._free.wait_for(lambda: not self._filling, START_SECONDS)

    def _lacking(self) -> bool:
        ready = sum(not used for _, used in self._idle) + self._opening
        return not self._closed and ready < self.ahead and self._room()

    def _filler(self) -> None:
        try:
            while self._claim():
                self._put(self._open())
        except (RollgymError, OSError, RuntimeError):
            # The next caller gets the error; or this process is exiting.
            with self._free:
                self._filling = False
                self._free.notify_all()

    def _claim(self) -> bool:
        with self._free:
            self._filling = self._lacking()
            self._opening += self._filling
            self._free.notify_all()
            return self._filling


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


def _forget_all() -> None:
    # Lock-holding threads do not exist after a fork, and the sandboxes belong to the parent.
    for pool in list(_pools):
        pool._start_afresh()


os.register_at_fork(after_in_child=_forget_all)
