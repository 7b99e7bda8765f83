"""What processes use, what they may use, and how they end. Runs inside."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Collection
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
MB = 1 << 20


def _slurp(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode("ascii", "replace")
    except OSError:
        return ""


def stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` after the name, from the state on; none where it is gone."""
    return _slurp(f"/proc/{pid}/stat").rpartition(")")[2].split()


def alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    fields = stat(pid)
    return bool(fields) and fields[0] not in "ZX"


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
    """End all processes below this one, but those kept."""
    if os.getpid() == 1 and not keep:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        _reap(0)
        return
    while True:
        rest = [pid for pid in family() if pid not in keep and alive(pid)]
        for pid in rest:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
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


def cpu_seconds(pids: Collection[int]) -> float:
    """Processor time of these processes and the children they waited for."""
    return sum(sum(int(field) for field in stat(pid)[11:15]) for pid in pids) / TICKS


def memory(pids: Collection[int], enough: int) -> int:
    """Bytes that these processes hold; exact only where it matters, above ``enough``."""
    rough = sum(_fields(pid, "status", ("RssAnon:", "RssShmem:")) for pid in pids)
    if rough <= enough:
        return rough
    # What forks share was counted for each of them. A process may hide its details: then all of it counts.
    total = 0
    for pid in pids:
        exact = _fields(pid, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
        total += exact or _fields(pid, "status", ("RssAnon:", "RssShmem:"))
    return total


def _fields(pid: int, file: str, names: tuple[str, ...]) -> int:
    lines = (line.split() for line in _slurp(f"/proc/{pid}/{file}").splitlines())
    return sum(int(words[1]) << 10 for words in lines if len(words) > 1 and words[0] in names)


def address_space() -> int:
    """Bytes of address space this process has now."""
    return int(_slurp("/proc/self/statm").split()[0]) * os.sysconf("SC_PAGESIZE")


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
