"""Linux-only process functions; no-ops on other systems."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """Kill this process when its parent exits, even during a long call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(0)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, daemons included."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> list[int]:
    """Return the pids of this process's children, zombies included (single-threaded processes only)."""
    pid = os.getpid()
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def open_memory_gauge(pid: int) -> int | None:
    """Open a descriptor from which `resident_mb` reads the memory of a process."""
    try:
        return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def peak_mb() -> float:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


def resident_mb(gauge: int | None) -> float:
    """Return the resident memory of the process behind the gauge in MB; 0 if unknown."""
    if gauge is None:
        return 0.0
    try:
        return int(os.pread(gauge, 128, 0).split()[1]) * _PAGE_MB
    except (OSError, IndexError):
        return 0.0
