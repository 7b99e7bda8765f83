"""What workers print: passed on to stderr up to a rate, with the last of it kept."""

from __future__ import annotations

import os
import select
import time

from rollgym.terminal import printable

_BURST = 256 * 1024
_PER_SECOND = 32 * 1024
_TAIL = 8 * 1024
_PIECE = 4096
"""As much as a pipe takes without blocking when it says that it is ready."""


class Output:
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
        """The last that was printed, passed on or not."""
        return self._tail.decode("utf-8", "replace")

    def read(self) -> bool:
        """Take what is there; False once there will be no more."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._tail = (self._tail + data)[-_TAIL:]
        self._pass_on(data)
        return bool(data)

    def drain(self) -> None:
        """Take the rest of a worker that is dead; not more, though children of it may go on printing."""
        for _ in range(16):
            before = self._tail
            if not self.read() or self._tail is before:
                break
        if self._dropped:
            self._say(f"rollgym: {self._dropped:,} bytes that {self._name} printed were dropped\n".encode())

    def _pass_on(self, data: bytes) -> None:
        now = time.monotonic()
        self._allowance = min(_BURST, self._allowance + (now - self._updated) * _PER_SECOND)
        self._updated = now
        if len(data) <= self._allowance and self._say(data):
            self._allowance -= len(data)
            return
        if not self._dropped:
            self._say(f"\nrollgym: {self._name} prints too much; some of it is dropped\n".encode())
        self._dropped += len(data)

    @staticmethod
    def _say(data: bytes) -> bool:
        """Write to stderr without ever waiting for its reader, control characters written out."""
        data = printable(data.decode("utf-8", "replace")).encode()
        for start in range(0, len(data), _PIECE):
            if not select.select([], [2], [], 0)[1]:
                return False
            try:
                os.write(2, data[start : start + _PIECE])
            except OSError:
                return True  # nobody reads it at all
        return True
