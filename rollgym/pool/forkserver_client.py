"""Client of the fork server, used by the pool."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from rollgym.pool.protocol import MAX_REPORT, Gone, Kill, Launch, Started, decode_report

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

_PATIENCE = 6.0
"""Seconds to wait for the fork server to exit: slightly longer than its own shutdown limit."""


class ForkServerClient:
    """Starts a fork server, sends it orders and receives reports; ``on_report(None)`` means it exited."""

    def __init__(self, on_report: Callable[[Started | Gone | None], None]) -> None:
        self._on_report = on_report
        self._loop = asyncio.get_running_loop()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _start(theirs.fileno())
        self._control.settimeout(5.0)
        self._loop.add_reader(self._control, self._read_reply)

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._process.pid

    def launch(self, number: int, connection: socket.socket, status: int) -> None:
        """Request a worker on the other end of ``connection``."""
        fds = [connection.fileno(), status]
        self._order(Launch(number), fds)

    def kill(self, number: int) -> None:
        """Request that a worker is killed."""
        self._order(Kill(number), [])

    def _order(self, order: Launch | Kill, fds: list[int]) -> None:
        try:
            socket.send_fds(self._control, [msgspec.msgpack.encode(order)], fds)
        except OSError:
            self._process.kill()  # its workers are killed with it, and the socket closes

    def _read_reply(self) -> None:
        try:
            message = self._control.recv(MAX_REPORT, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message:
            self._on_report(decode_report(message))
        else:
            self._loop.remove_reader(self._control)
            self._on_report(None)

    async def close(self) -> None:
        """Stop the fork server and all its workers."""
        self._loop.remove_reader(self._control)
        self._control.close()
        await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _start(fd: int) -> subprocess.Popen[bytes]:
    # A process that forks should have one thread; numpy's libraries start more by default.
    ours = [name for name in _THREADS if name not in os.environ]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "rollgym.pool.forkserver", str(fd), *ours],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **dict.fromkeys(ours, "1")},
    )
