"""The pool's end of its keeper."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from rollgym.pool.wire import MAX_REPORT, Gone, Kill, Launch, Started, decode_report

_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

_PATIENCE = 6.0
"""Seconds for a keeper to bury everybody: a little more than it gives itself."""


class KeeperLink:
    """Starts a keeper, gives it orders and hears its reports; ``on_report(None)`` says that it is gone."""

    def __init__(self, on_report: Callable[[Started | Gone | None], None]) -> None:
        self._on_report = on_report
        self._loop = asyncio.get_running_loop()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _start(theirs.fileno())
        self._control.settimeout(5.0)
        self._loop.add_reader(self._control, self._hear)

    @property
    def pid(self) -> int:
        """The keeper's process."""
        return self._process.pid

    def launch(self, number: int, connection: socket.socket, board: int) -> None:
        """Ask for a worker on the other end of a connection."""
        fds = [connection.fileno(), board]
        self._order(Launch(number), fds)

    def kill(self, number: int) -> None:
        """Ask for a worker's death."""
        self._order(Kill(number), [])

    def _order(self, order: Launch | Kill, fds: list[int]) -> None:
        try:
            socket.send_fds(self._control, [msgspec.msgpack.encode(order)], fds)
        except OSError:
            self._process.kill()  # its workers die with it, and the socket tells us so

    def _hear(self) -> None:
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
        """Let the keeper go, and everything it keeps with it."""
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
    # A process that forks should have one thread, and numpy's libraries start more unless told not to.
    ours = [name for name in _THREADS if name not in os.environ]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "rollgym.pool.keeper", str(fd), *ours],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **dict.fromkeys(ours, "1")},
    )
