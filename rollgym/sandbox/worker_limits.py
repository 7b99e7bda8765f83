"""What processes use, what they may use, and how they end. Runs inside."""

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
"""Of ``/proc/PID/stat``, those that are looked at: state, CPU times, number of threads."""
QUEUED_SIGNALS = 256
"""The kernel counts those of one user together, and timers with them."""
PARK_SECONDS = 5.0
"""How long a process may take to stop."""
ROUGH = (b"RssAnon:", b"RssShmem:", b"VmSwap:", b"HugetlbPages:")
EXACT = (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:", b"Shared_Hugetlb:", b"Private_Hugetlb:")
"""Fields of ``status`` and of ``smaps_rollup`` that count."""


def _slurp(path: str) -> bytes:
    """A file of /proc: without the objects of `open`, whose cost every execution would feel."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    parts = []
    try:
        while part := os.read(file, 1 << 16):
            parts.append(part)
            if len(part) < 1 << 11:  # The kernel fills a page as far as lines fit: this is the end.
                break
    except OSError:
        return b""
    finally:
        os.close(file)
    return b"".join(parts)


def stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name, from the state on; none where it is gone."""
    return _slurp(f"/proc/{pid}/stat").rpartition(b")")[2].decode("ascii", "replace").split(None, STAT_FIELDS)


def alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    fields = stat(pid)
    # One whose first thread has ended looks dead while others go on.
    return bool(fields) and (fields[0] not in "ZX" or int(fields[17]) > 1)


def threads(pid: int) -> list[str]:
    """The folders in /proc of the threads of a process: each may have descriptors of its own."""
    try:
        return [f"/proc/{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def family() -> list[int]:
    """All processes below this one."""
    me = os.getpid()
    if me == 1:
        return [pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != 1]
    return descendants(me)


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    found: list[int] = []
    ask = [pid]
    while ask:
        children = _children(ask.pop())
        found += children
        ask += children
    return found


def _children(pid: int) -> list[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(word) for task in tasks for word in _slurp(f"/proc/{pid}/task/{task}/children").split()]


def sweep(keep: Collection[int] = ()) -> None:
    """End all processes below this one, but those kept; those too where they start others without end."""
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

    It stays stopped: the filter refuses what could send it SIGCONT later (timers, descriptors), and all
    others are dead. What their death sends it comes before the last look.

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
        # Without its first thread it is of no use either.
        if state in "ZX" or time.monotonic() > until:
            sweep()
            return False
        if state != "T":
            send(head, signal.SIGSTOP)
        time.sleep(pause)
        pause = min(2 * pause, 0.004)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def cpu_seconds(pids: Collection[int]) -> float:
    """CPU time of these processes and the children they waited for."""
    return sum(sum(int(field) for field in stat(pid)[11:15]) for pid in pids) / TICKS


def cpu_total(pids: Collection[int]) -> float:
    """CPU time of all that ever ran below this process: of these, which are there, and of those it reaped.

    Nothing falls out: the filter lets no process ignore its children, so each is waited for or still there.
    """
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    return reaped.ru_utime + reaped.ru_stime + cpu_seconds(pids)


def memory(pids: Collection[int], enough: int) -> int:
    """Bytes that these processes hold; exact only where it matters, above ``enough``."""
    rough = sum(_held(pid, "status", ROUGH) for pid in pids)
    if rough <= enough:
        return rough
    # What forks share was counted for each of them. A process may hide its details: then all of it counts.
    return sum(_held(pid, "smaps_rollup", EXACT) or _held(pid, "status", ROUGH) for pid in pids)


def _held(pid: int, file: str, names: tuple[bytes, ...]) -> int:
    found = _fields(f"/proc/{pid}/{file}", names)
    if found is None:  # Its first thread has ended, and with it what the process shows.
        found = next(
            (size for task in threads(pid) if (size := _fields(f"{task}/{file}", names)) is not None), 0
        )
    return found


def _fields(path: str, names: tuple[bytes, ...]) -> int | None:
    """The sum of these fields, in bytes; none where there are none."""
    text = _slurp(path)
    places = [(text.find(b"\n" + name), len(name) + 1) for name in names]
    found = [int(text[at + size : at + size + 32].split(None, 1)[0]) << 10 for at, size in places if at >= 0]
    return sum(found) if found else None


def address_space(pid: int | str = "self") -> int:
    """Bytes of address space a process has now."""
    return int((_slurp(f"/proc/{pid}/statm").split() or [b"0"])[0]) * os.sysconf("SC_PAGESIZE")


def tasks_of_user() -> int:
    """Threads that run under this user id, in all: what RLIMIT_NPROC counts."""
    me, count = os.getuid(), 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == me:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def limit(limits: dict[str, Any], base: dict[str, int], hard: bool = True) -> None:
    """Put limits on this process; without ``hard`` they may be raised again, but not above the hard ones."""
    memory_bytes = limits["memory_mb"] * MB
    _set(resource.RLIMIT_CORE, 0, hard)
    _set(resource.RLIMIT_SIGPENDING, QUEUED_SIGNALS, hard)
    _set(resource.RLIMIT_MSGQUEUE, 0, hard)
    _set(resource.RLIMIT_NOFILE, limits["open_files"], hard)
    _set(resource.RLIMIT_FSIZE, limits["file_mb"] * MB, hard)
    _set(resource.RLIMIT_AS, base["address_space"] + memory_bytes + 64 * MB, hard)
    if base["tasks"] >= 0:
        _set(resource.RLIMIT_NPROC, base["tasks"] + limits["processes"], hard)
    # Without a hard limit, a later turn may have its own; the watch in the worker holds anyway.
    _set(resource.RLIMIT_CPU, limits["cpu"], False)


def _set(what: int, value: int, hard: bool) -> None:
    top = resource.getrlimit(what)[1]
    value = value if top == resource.RLIM_INFINITY else min(value, top)
    resource.setrlimit(what, (value, value if hard else top))
