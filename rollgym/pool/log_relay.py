"""Relays worker output to stderr up to a rate and keeps the last part."""

from __future__ import annotations

import os
import select
import time

from rollgym.utils.terminal import printable

_BURST = 256 * 1024
_PER_SECOND = 32 * 1024
_TAIL = 8 * 1024
_PIECE = 4096
"""Bytes that a pipe that is ready takes without blocking."""


class LogRelay:
    """The output of one worker."""

    def __init__(self, fd: int, name: str) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._name = name
        self._tail = b""
        self._allowance = float(_BURST)
        self._updated = time.monotonic()
        self._dropped = 0

    @property
    def tail(self) -> str:
        """Last part of the output, relayed or not."""
        return self._tail.decode("utf-8", "replace")

    def read(self) -> bool:
        """Read available output; return False at the end."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._tail = (self._tail + data)[-_TAIL:]
        self._relay(data)
        return bool(data)

    def drain(self) -> None:
        """Read the rest of an exited worker's output, bounded since its children may still print."""
        for _ in range(16):
            before = self._tail
            if not self.read() or self._tail is before:
                break
        if self._dropped:
            self._write_stderr(
                f"rollgym: {self._dropped:,} bytes that {self._name} printed were dropped\n".encode()
            )

    def _relay(self, data: bytes) -> None:
        now = time.monotonic()
        self._allowance = min(_BURST, self._allowance + (now - self._updated) * _PER_SECOND)
        self._updated = now
        if len(data) <= self._allowance and self._write_stderr(data):
            self._allowance -= len(data)
            return
        if not self._dropped:
            self._write_stderr(
                f"\nrollgym: {self._name} prints too much; part of the output is dropped\n".encode()
            )
        self._dropped += len(data)

    @staticmethod
    def _write_stderr(data: bytes) -> bool:
        """Write to stderr without blocking, with control characters escaped."""
        data = printable(data.decode("utf-8", "replace")).encode()
        for start in range(0, len(data), _PIECE):
            if not select.select([], [2], [], 0)[1]:
                return False
            try:
                os.write(2, data[start : start + _PIECE])
            except OSError:
                return True  # stderr is closed
        return True
