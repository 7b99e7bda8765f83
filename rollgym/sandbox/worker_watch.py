"""Monitors a running execution: output, time, memory, disk. Runs inside."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Collection
from typing import Any

from rollgym.sandbox import worker_files, worker_limits

MOST_FILES = 20_000
"""Maximum number of files, which take kernel memory."""
CHECK_SECONDS, SOON_SECONDS = 0.05, 0.01
"""Seconds between checks of memory and time; shorter above a quarter of the memory."""
TICK_MS, LONG_TICK_MS = 2, 25
_SCRATCH = bytearray(1 << 16)


class HostGone(Exception):
    """The other end is closed."""


class Tap:
    """An output stream: head and tail are kept, the rest is counted."""

    def __init__(self, descriptor: int, keep: int) -> None:
        self.descriptor, self.keep, self.total = descriptor, keep, 0
        self._head, self._tail = bytearray(keep), bytearray(keep)

    def drain(self) -> int:
        """Read available data, at most 1 MB; return its size."""
        scratch, taken = memoryview(_SCRATCH), 0
        for _ in range(16):
            try:
                size = os.readv(self.descriptor, [scratch])
            except BlockingIOError:
                break
            if not size:
                break
            self._keep(scratch[:size])
            taken += size
        if taken:
            _SCRATCH[: min(taken, len(_SCRATCH))] = bytes(min(taken, len(_SCRATCH)))
        return taken

    def _keep(self, piece: memoryview) -> None:
        at = self.total
        self.total += len(piece)
        if at < self.keep:
            first = piece[: self.keep - at]
            self._head[at : at + len(first)] = first
            piece, at = piece[len(first) :], at + len(first)
        skip = max(0, len(piece) - self.keep)
        at, piece = (at + skip) % self.keep, piece[skip:]
        room = min(len(piece), self.keep - at)
        self._tail[at : at + room] = piece[:room]
        self._tail[: len(piece) - room] = piece[room:]

    def parts(self) -> tuple[list[int], list[memoryview]]:
        """Return sizes of head, tail and total, and the bytes."""
        head, tail = memoryview(self._head), memoryview(self._tail)
        if self.total <= self.keep:
            return [self.total, 0, self.total], [head[: self.total]]
        if self.total < 2 * self.keep:
            rest = self.total - self.keep
            return [self.keep, rest, self.total], [head, tail[:rest]]
        at = self.total % self.keep
        return [self.keep, self.keep, self.total], [head, tail[at:], tail[:at]]

    def wipe(self) -> None:
        """Overwrite the buffers."""
        for part in (self._head, self._tail):
            part[: self.total] = bytes(min(self.total, len(part)))


def pipe() -> tuple[int, int]:
    """Create a pipe with a non-blocking reader."""
    source, sink = os.pipe()
    os.set_blocking(source, False)
    return source, sink


class Watch:
    """Monitors time, memory, output and disk of one execution."""

    _disk_seen = 0.0
    """Time of the last disk check."""

    def __init__(
        self,
        host: int,
        config: dict[str, Any],
        limits: dict[str, Any],
        cpu_before: float,
        out: int,
        err: int,
        folder: str,
        ready: int | None = None,
    ) -> None:
        self.host, self.limits, self.folder = host, limits, folder
        self.work, self.scratch = config["work"], config["scratch"]
        self.taps = (Tap(out, 2 * limits["output_chars"]), Tap(err, 2 * limits["output_chars"]))
        self.started = self._checked = time.monotonic()
        self._every = CHECK_SECONDS
        self.given = 0
        """Bytes of input, which may be in an unnamed file."""
        self._ready = ready
        """Pipe that receives a byte when untrusted code starts; none if it has started."""
        self._cpu_before = cpu_before
        self._tick = TICK_MS
        self._disk_due = 0.0

    @property
    def seconds(self) -> float:
        """Return elapsed seconds."""
        return time.monotonic() - self.started

    def wait(self, *descriptors: int) -> tuple[str | None, list[int]]:
        """Wait briefly for any of these; return the broken limit, if any, and the ready ones."""
        left = self.limits["seconds"] - self.seconds
        if left <= 0:
            return "timeout", []
        poll = select.poll()
        poll.register(self.host, 0)
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        ready = [
            descriptor for descriptor, _ in poll.poll(min(left * 1000 + 1, self._tick, self._every * 1000))
        ]
        if self.host in ready:
            raise HostGone
        # Poll faster for faster writers; a wake-up per line would cost more than the code.
        flow = sum(tap.drain() for tap in self.taps)
        self._tick = TICK_MS if flow > 1 << 14 else min(self._tick * 2, LONG_TICK_MS)
        if sum(tap.total for tap in self.taps) > self.limits["output_mb"] * worker_limits.MB:
            return "output_limit", []
        # Even if a pipe is ready: constant output must not bypass other limits.
        broken = self._broken()
        return broken, [] if broken else ready

    def _broken(self) -> str | None:
        now = time.monotonic()
        if now - self._checked < self._every:
            return None
        self._checked = now
        pids = worker_limits.family()
        broken = self._uses_too_much(pids, pids)
        if broken or now < self._disk_due:
            return broken
        full = self._fills_disk()
        # Counting many files is slow; bound it to 10 % of the time.
        self._disk_due = now + 10 * (time.monotonic() - now)
        return "output_limit" if full else None

    def broken(self, pids: list[int], stay: tuple[int, ...]) -> str | None:
        """Return the broken limit, if any, at the end of a turn whose processes may persist."""
        broken = self._uses_too_much(pids, stay)
        # Turns shorter than the check interval share checks.
        if broken or (not self._disk_due and time.monotonic() - Watch._disk_seen < CHECK_SECONDS):
            return broken
        return "output_limit" if self._fills_disk() else None

    def _uses_too_much(self, pids: list[int], holders: Collection[int]) -> str | None:
        """Return whether memory of ``holders`` or total CPU time exceeds its limit."""
        most = self.limits["memory_mb"] * worker_limits.MB
        used = worker_limits.memory(holders, most)
        if used > most:
            return "memory_limit"
        self._every = SOON_SECONDS if 4 * used > most else CHECK_SECONDS
        if worker_limits.cpu_total(pids) - self._cpu_before > self.limits["cpu"]:
            return "cpu_limit"
        return None

    def _fills_disk(self) -> bool:
        Watch._disk_seen = time.monotonic()
        if self.scratch:  # Sized tmpfs: only the number of files is unlimited.
            states = [os.statvfs(path) for path in (self.work, *self.scratch)]
            return any(state.f_files - state.f_ffree > MOST_FILES for state in states)
        most = self.limits["disk_mb"] * worker_limits.MB
        size, files = worker_files.usage(self.folder, MOST_FILES)
        if size > most or files > MOST_FILES:
            return True
        if self._ready is not None and not select.select([self._ready], [], [], 0)[0]:
            return False
        hidden = worker_files.unlinked(self.work, self.limits["file_mb"] * worker_limits.MB)
        return hidden is None or size + hidden > most + self.given

    def wipe(self) -> None:
        """Overwrite the buffers."""
        for tap in self.taps:
            tap.wipe()

    def reply(self, ended: str, code: int | None, state: str) -> tuple[dict[str, Any], list[memoryview]]:
        """Build the answer to the host, including output left in the pipes."""
        for tap in self.taps:
            tap.drain()
        (out, first), (err, second) = (tap.parts() for tap in self.taps)
        header = {"ended": ended, "code": code, "state": state, "seconds": self.seconds}
        return header | {"stdout": out, "stderr": err}, first + second
