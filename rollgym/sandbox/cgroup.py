"""Cgroups (v1 and v2) that limit memory and processes of a sandbox."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from rollgym.sandbox.types import Limits

SPARE_MB = 80
"""Bytes for the worker itself and /dev/shm."""
SPARE_PROCESSES = 8
_numbers = itertools.count()


class Cgroup:
    """A cgroup: one v2 folder, or one v1 folder each for memory and pids."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._limits: Limits | None = None
        self._kills = 0

    @classmethod
    def make(cls, limits: Limits) -> Cgroup | None:
        """Create a child cgroup; ``None`` if that is not permitted."""
        name = f"rollgym-{os.getpid()}-{next(_numbers)}"
        for parents in _places():
            _forget_the_dead(parents.values())
            group = cls({kind: parent / name for kind, parent in parents.items()})
            try:
                for folder in group._folders.values():
                    folder.mkdir()
                group.adapt(limits)
                return group
            except OSError:
                group.close()
        return None

    def adapt(self, limits: Limits) -> None:
        """Set the limits if they differ."""
        if limits == self._limits:
            return
        size = (limits.memory_mb + 2 * limits.disk_mb + SPARE_MB) << 20
        tasks = limits.processes + SPARE_PROCESSES
        if both := self._folders.get("unified"):
            _set(both / "memory.max", size)
            with contextlib.suppress(OSError):
                _set(both / "memory.swap.max", 0)
            _set(both / "pids.max", tasks)
        else:
            _set(self._folders["memory"] / "memory.limit_in_bytes", size)
            _set(self._folders["pids"] / "pids.max", tasks)
        self._limits = limits

    def add(self, pids: Iterable[int]) -> None:
        """Move processes into the cgroup; their later children inherit it."""
        for pid in pids:
            for folder in self._folders.values():
                _set(folder / "cgroup.procs", pid)

    @property
    def members(self) -> list[str]:
        """The files that a process writes ``0`` to in order to join."""
        return [str(folder / "cgroup.procs") for folder in self._folders.values()]

    def out_of_memory(self) -> bool:
        """Whether the kernel OOM-killed since the last call."""
        folder = self._folders.get("unified") or self._folders["memory"]
        file = folder / ("memory.events" if "unified" in self._folders else "memory.oom_control")
        words = dict(line.split() for line in file.read_text().splitlines())
        before, self._kills = self._kills, int(words.get("oom_kill", 0))
        return self._kills > before

    def close(self) -> None:
        """Kill remaining processes and remove the cgroup."""
        for folder in self._folders.values():
            for _ in range(200):
                with contextlib.suppress(OSError):
                    folder.rmdir()
                if not folder.exists():
                    break
                with contextlib.suppress(OSError):
                    for pid in (folder / "cgroup.procs").read_text().split():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(int(pid), signal.SIGKILL)
                time.sleep(0.005)


def _set(file: Path, value: int) -> None:
    # Never create: outside a cgroup file system this would be an ordinary file that limits nothing.
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def _places() -> list[dict[str, Path]]:
    """Return candidate parents: our own cgroup, and for v2 its siblings."""
    try:
        own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    except OSError:
        return []
    mounts = _mounts()
    parents = []
    if {"memory", "pids"} <= own.keys() & mounts.keys():
        parents.append({kind: mounts[kind] / own[kind].lstrip("/") for kind in ("memory", "pids")})
    if "" in own and "" in mounts:
        mine = mounts[""] / own[""].lstrip("/")
        parents += [{"unified": folder} for folder in dict.fromkeys((mine, mine.parent)) if _controls(folder)]
    return parents


def _controls(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return {"memory", "pids"} <= set((folder / "cgroup.subtree_control").read_text().split())
    return False


def _mounts() -> dict[str, Path]:
    """Return mount points by v1 controller; v2 under the empty name."""
    mounts: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup2":
            mounts[""] = Path(folder)
        elif kind == "cgroup":
            mounts |= {option: Path(folder) for option in options.split(",") if option in ("memory", "pids")}
    return mounts


def _forget_the_dead(parents: Iterable[Path]) -> None:
    """Remove cgroups left by killed processes."""
    for parent in parents:
        for folder in parent.glob("rollgym-*"):
            owner = folder.name.split("-")[1]
            if not Path("/proc", owner).exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
