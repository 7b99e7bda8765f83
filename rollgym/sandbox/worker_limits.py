"""Resource usage, limits and termination of processes. Runs inside."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Collection
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
MB = 1 << 20
STAT_FIELDS = 19
"""Fields of ``/proc/PID/stat`` that are read: state, CPU times, number of threads."""
QUEUED_SIGNALS = 256
"""Signals pending per user; the kernel counts timers with them."""
PARK_SECONDS = 5.0
"""Seconds for a process to stop."""
ROUGH = (b"RssAnon:", b"RssShmem:", b"VmSwap:", b"HugetlbPages:")
EXACT = (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:", b"Shared_Hugetlb:", b"Private_Hugetlb:")
"""Fields of ``status`` and of ``smaps_rollup`` that count."""


def _slurp(path: str) -> bytes:
    """Read a file of /proc with plain system calls, which are faster than `open`."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    parts = []
    try:
        while part := os.read(file, 1 << 16):
            parts.append(part)
            if len(part) < 1 << 11:  # The kernel fills a page with whole lines: this is the end.
                break
    except OSError:
        return b""
    finally:
        os.close(file)
    return b"".join(parts)


def stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; empty if the process is gone."""
    return _slurp(f"/proc/{pid}/stat").rpartition(b")")[2].decode("ascii", "replace").split(None, STAT_FIELDS)


def alive(pid: int) -> bool:
    """Whether the process exists and has not exited."""
    fields = stat(pid)
    # A process whose first thread exited looks dead while others run.
    return bool(fields) and (fields[0] not in "ZX" or int(fields[17]) > 1)


def threads(pid: int) -> list[str]:
    """Return the /proc folders of a process's threads, which may have separate descriptors."""
    try:
        return [f"/proc/{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def family() -> list[int]:
    """Return all descendants of this process."""
    me = os.getpid()
    if me == 1:
        return [pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != 1]
    return descendants(me)


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    pids: list[int] = []
    ask = [pid]
    while ask:
        children = _children(ask.pop())
        pids += children
        ask += children
    return pids


def _children(pid: int) -> list[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(word) for task in tasks for word in _slurp(f"/proc/{pid}/task/{task}/children").split()]


def sweep(keep: Collection[int] = ()) -> None:
    """End all descendants except those kept; these too if they keep forking."""
    until = time.monotonic() + PARK_SECONDS
    while True:
        if time.monotonic() > until:
            keep = ()
        if os.getpid() == 1 and not keep:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return
            _reap(0)
            return
        rest = [pid for pid in family() if pid not in keep and alive(pid)]
        for pid in rest:
            send(pid, signal.SIGKILL)
        _reap(os.WNOHANG)
        if not rest:
            return
        time.sleep(0.001)


def _reap(how: int) -> None:
    try:
        while os.waitpid(-1, how)[0]:
            pass
    except ChildProcessError:
        pass


def park(head: int) -> bool:
    """Stop the head of a session and end all other processes below this one.

    It stays stopped: the filter denies what could send SIGCONT later (timers, descriptors), and all
    others are dead. Signals of their exit arrive before the last check.

    Returns:
        Whether it is stopped; else it was ended.
    """
    until, pause = time.monotonic() + PARK_SECONDS, 0.0005
    while True:
        rest = [pid for pid in family() if pid != head and alive(pid)]
        for pid in rest:
            send(pid, signal.SIGKILL)
        _reap(os.WNOHANG)
        state = (stat(head) or ["X"])[0]
        if state == "T" and not rest:
            return True
        # Unusable without its first thread.
        if state in "ZX" or time.monotonic() > until:
            sweep()
            return False
        if state != "T":
            send(head, signal.SIGSTOP)
        time.sleep(pause)
        pause = min(2 * pause, 0.004)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have exited."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def cpu_seconds(pids: Collection[int]) -> float:
    """Return the CPU time of these processes and their reaped children."""
    return sum(sum(int(field) for field in stat(pid)[11:15]) for pid in pids) / TICKS


def cpu_total(pids: Collection[int]) -> float:
    """Return the CPU time of all descendants, running (``these``) and reaped.

    Complete: the filter denies ignoring SIGCHLD, so each child is reaped or still exists.
    """
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    return reaped.ru_utime + reaped.ru_stime + cpu_seconds(pids)


def memory(pids: Collection[int], enough: int) -> int:
    """Return the memory of these processes in bytes; exact only above ``enough``."""
    rough = sum(_held(pid, "status", ROUGH) for pid in pids)
    if rough <= enough:
        return rough
    # Shared pages were counted per fork. If a process hides its details, all of it counts.
    return sum(_held(pid, "smaps_rollup", EXACT) or _held(pid, "status", ROUGH) for pid in pids)


def _held(pid: int, file: str, names: tuple[bytes, ...]) -> int:
    total = _fields(f"/proc/{pid}/{file}", names)
    if total is None:  # Its first thread exited, so /proc shows nothing.
        total = next(
            (size for task in threads(pid) if (size := _fields(f"{task}/{file}", names)) is not None), 0
        )
    return total


def _fields(path: str, names: tuple[bytes, ...]) -> int | None:
    """Return the sum of these fields in bytes; ``None`` if missing."""
    text = _slurp(path)
    positions = [(text.find(b"\n" + name), len(name) + 1) for name in names]
    sizes = [
        int(text[at + size : at + size + 32].split(None, 1)[0]) << 10 for at, size in positions if at >= 0
    ]
    return sum(sizes) if sizes else None


def address_space(pid: int | str = "self") -> int:
    """Return the address space of a process in bytes."""
    return int((_slurp(f"/proc/{pid}/statm").split() or [b"0"])[0]) * os.sysconf("SC_PAGESIZE")


def tasks_of_user() -> int:
    """Return the number of threads of this user id, as counted by RLIMIT_NPROC."""
    me, count = os.getuid(), 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == me:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def limit(limits: dict[str, Any], base: dict[str, int], hard: bool = True) -> None:
    """Set limits on this process; without ``hard`` they may be raised up to the hard limits."""
    memory_bytes = limits["memory_mb"] * MB
    _set(resource.RLIMIT_CORE, 0, hard)
    _set(resource.RLIMIT_SIGPENDING, QUEUED_SIGNALS, hard)
    _set(resource.RLIMIT_MSGQUEUE, 0, hard)
    _set(resource.RLIMIT_NOFILE, limits["open_files"], hard)
    _set(resource.RLIMIT_FSIZE, limits["file_mb"] * MB, hard)
    _set(resource.RLIMIT_AS, base["address_space"] + memory_bytes + 64 * MB, hard)
    if base["tasks"] >= 0:
        _set(resource.RLIMIT_NPROC, base["tasks"] + limits["processes"], hard)
    # Without a hard limit a later turn can set its own; the worker enforces limits anyway.
    _set(resource.RLIMIT_CPU, limits["cpu"], False)


def _set(kind: int, value: int, hard: bool) -> None:
    top = resource.getrlimit(kind)[1]
    value = value if top == resource.RLIM_INFINITY else min(value, top)
    resource.setrlimit(kind, (value, value if hard else top))
