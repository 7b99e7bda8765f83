"""The keeper: forks the workers of a pool, passes on what they print, and buries them.

A process of its own, with one thread, that has imported what every worker needs, so that a new worker is
ready in milliseconds. It owns the processes: when a worker is gone, so is everything that worker left behind;
when the pool is gone, however it went, so are all workers. `rollgym.pool.keeping` starts it and talks to it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import io
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

import msgspec
import numpy as np

from rollgym.pool import linux
from rollgym.pool.board import Board
from rollgym.pool.output import Output
from rollgym.pool.wire import Gone, Kill, Started, decode_order
from rollgym.pool.worker import work

_HIGH = 200
"""A worker's own socket has a number from here on, where environments that tidy up descriptors miss it."""
_LAST_WORDS = 5.0
"""Seconds to bury everybody once the pool is gone."""


class Keeper:
    """Does what the pool orders until the pool goes away."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pool = os.getppid()
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._numbers: dict[int, int] = {}
        self._outputs: dict[int, Output] = {}
        self._deaths = -1
        self._open = True

    def run(self) -> None:
        """Serve until the pool is gone and every process with it."""
        linux.adopt_orphans()
        self._listen(self._control.fileno(), self._obey)
        self._listen(self._child_signals(), self._bury)
        # Time spent collecting objects that live for ever is lost, and so is sharing their pages.
        gc.collect()
        gc.freeze()
        while self._open:
            for fd, _ in self._poll.poll(1000):
                if fd in self._handlers:
                    self._handlers[fd]()
            if os.getppid() != self._pool:  # the pool died, but somebody else holds its end of the socket
                self._open = False
        self._end()

    def _listen(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def _child_signals(self) -> int:
        """A descriptor that becomes readable when a child has died."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._deaths = reader
        return reader

    # The pool's orders.

    def _obey(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 4096, 2)
        except ConnectionError:
            message, fds = b"", []
        if not message:
            self._open = False
            return
        order = decode_order(message)
        if isinstance(order, Kill):
            for pid in [pid for pid, number in self._numbers.items() if number == order.number]:
                _kill_group(pid)
            return
        try:
            self._launch(order.number, *fds)
        except OSError as error:  # too many processes or descriptors
            self._report(Gone(order.number, 71, f"no worker could be started: {error}"))
        for fd in fds:
            os.close(fd)

    def _launch(self, number: int, connection: int, board: int) -> None:
        ours, theirs = os.pipe()
        keeper = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(ours)
            os.close(theirs)
            raise
        if not pid:
            _be_worker(keeper, connection, board, theirs)
        os.close(theirs)
        self._numbers[pid] = number
        output = self._outputs[pid] = Output(ours, f"worker {number} (process {pid})")
        self._listen(ours, lambda: self._hear(output))
        self._report(Started(number, pid))

    def _hear(self, output: Output) -> None:
        if not output.read():
            self._silence(output)

    def _silence(self, output: Output) -> None:
        if self._handlers.pop(output.fd, None) is not None:
            self._poll.unregister(output.fd)
            os.close(output.fd)

    def _report(self, report: Started | Gone) -> None:
        try:
            self._control.send(msgspec.msgpack.encode(report))
        except OSError:
            self._open = False

    # The dead.

    def _bury(self) -> None:
        """Reap whoever died, and kill what dead workers left: their group, and orphans that came to us."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._deaths, 4096)
        while (pid := _dead_child()) is not None:
            number = self._numbers.pop(pid, None)
            if number is not None:
                _kill_group(pid)  # before reaping: until then the number is surely theirs
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if number is not None:
                output = self._outputs.pop(pid)
                output.drain()
                self._silence(output)
                self._report(Gone(number, code, output.tail))
        for pid in linux.children():
            if pid not in self._numbers:
                _kill(pid)

    def _end(self) -> None:
        for pid in self._numbers:
            _kill_group(pid)
        give_up = time.monotonic() + _LAST_WORDS
        while time.monotonic() < give_up:
            self._bury()
            try:
                if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    time.sleep(0.01)
            except ChildProcessError:
                return


def _dead_child() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        _kill(pid)  # it has not made its group yet


def _be_worker(keeper: int, connection: int, board: int, output: int) -> NoReturn:
    """In the new process: let go of everything that is the keeper's, and work."""
    code = 71
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        linux.die_with(keeper)
        linux.adopt_orphans()
        os.dup2(output, 1)
        os.dup2(output, 2)
        page = Board(board)
        own = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        os.closerange(3, own)
        os.closerange(own + 1, 1 << 20)
        faulthandler.enable()
        np.random.seed()  # else environments that draw from it would draw the same in every worker
        work(socket.socket(fileno=own), page)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Keep the workers of the pool at the other end of the socket whose descriptor is the first argument.

    Further arguments name environment variables that were meant for this process, not for environments.
    """
    for name in sys.argv[2:]:
        os.environ.pop(name, None)
    # Ctrl-C reaches the whole terminal; the pool decides when its workers stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Whatever an environment prints must not mix with a command's own output.
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    with socket.socket(fileno=int(sys.argv[1])) as control:
        Keeper(control).run()


if __name__ == "__main__":
    main()
