"""Shared memory page with the status of a worker, read by the pool without a request.

The worker writes a heartbeat and, for each of its threads, which lease is being served since when. The pool
reads it to find calls that exceed a limit and, after a worker died, the calls that were running.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from typing import NamedTuple

_BEAT, _USED, _FIRST = 0, 1, 2
SLOTS = 4095
_EACH = 3
_CELLS = _FIRST + _EACH * SLOTS
_SIZE = _CELLS * 8


class Running(NamedTuple):
    """A running call to an environment."""

    slot: int
    lease: int
    seconds: float
    mb_before: float
    """Peak memory of the process when the call began, where it is measured."""


def create() -> int:
    """Create an empty page and return its descriptor."""
    if sys.platform == "linux":
        fd = os.memfd_create("rollgym-status")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _SIZE)
    return fd


class StatusPage:
    """Aligned 64-bit cells, each written by one thread only, so that no lock is needed."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _SIZE)
        self._cells = memoryview(self._memory).cast("q")

    # The worker's side.

    def beat(self) -> None:
        """Record a heartbeat."""
        self._cells[_BEAT] = time.monotonic_ns()

    def use(self, slot: int) -> None:
        """Mark slots up to this one as used."""
        if slot >= self._cells[_USED]:
            self._cells[_USED] = slot + 1

    def enter(self, slot: int, lease: int, mb: float = 0.0) -> None:
        """Record that a call for the lease begins. Leases count from 1; 0 means no call."""
        cells, cell = self._cells, _FIRST + _EACH * slot
        # The lease last: a reader never sees it with the time of an older call.
        cells[cell + 1] = time.monotonic_ns()
        cells[cell + 2] = int(mb)
        cells[cell] = lease

    def leave(self, slot: int) -> None:
        """Record that the call has ended."""
        self._cells[_FIRST + _EACH * slot] = 0

    def forget(self) -> None:
        """In a child that an environment forked: write to private memory from now on."""
        self._cells = memoryview(bytearray(_SIZE)).cast("q")

    # The pool's side.

    @property
    def last_beat(self) -> int:
        """Monotonic time of the last heartbeat in nanoseconds; 0 before the first."""
        return self._cells[_BEAT]

    def running(self) -> list[Running]:
        """Return the calls that are running, or were running when the worker died."""
        cells, now = self._cells, time.monotonic_ns()
        calls = []
        for slot in range(cells[_USED]):
            cell = _FIRST + _EACH * slot
            lease = cells[cell]
            if lease:
                calls.append(Running(slot, lease, (now - cells[cell + 1]) / 1e9, cells[cell + 2]))
        return calls

    def close(self) -> None:
        """Unmap the page."""
        self._cells.release()
        self._memory.close()
