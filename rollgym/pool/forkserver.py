"""Fork server: forks workers, relays their output, reaps them.

A separate single-threaded process that has imported what every worker needs, so that a new worker is ready
in milliseconds. It owns the processes: when a worker exits, everything that worker left behind is killed;
when the pool exits, for any reason, all workers are killed. `rollgym.pool.worker_handle` starts it.
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
from rollgym.pool.protocol import Gone, Kill, Started, decode_order
from rollgym.pool.status_page import StatusPage
from rollgym.pool.worker import work
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


_HIGH = 200
"""Lowest descriptor of a worker's socket, so that environments that close low descriptors miss it."""
_SHUTDOWN_SECONDS = 5.0
"""Seconds to reap all workers after the pool has exited."""


class ForkServer:
    """Executes the pool's orders until the pool exits."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pool = os.getppid()
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._numbers: dict[int, int] = {}
        self._outputs: dict[int, LogRelay] = {}
        self._deaths = -1
        self._open = True

    def run(self) -> None:
        """Serve until the pool and all workers have exited."""
        linux.adopt_orphans()
        self._listen(self._control.fileno(), self._handle_order)
        self._listen(self._child_signals(), self._reap)
        # Collecting permanent objects wastes time and unshares their memory pages.
        gc.collect()
        gc.freeze()
        while self._open:
            for fd, _ in self._poll.poll(1000):
                if fd in self._handlers:
                    self._handlers[fd]()
            if os.getppid() != self._pool:  # the pool died, but another process holds its end of the socket
                self._open = False
        self._end()

    def _listen(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def _child_signals(self) -> int:
        """Return a descriptor that becomes readable when a child exits."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._deaths = reader
        return reader

    # Orders from the pool.

    def _handle_order(self) -> None:
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
            self._report(Gone(order.number, 71, f"cannot start a worker: {error}"))
        for fd in fds:
            os.close(fd)

    def _launch(self, number: int, connection: int, status: int) -> None:
        ours, theirs = os.pipe()
        forkserver = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            os.close(ours)
            os.close(theirs)
            raise
        if not pid:
            _run_worker(forkserver, connection, status, theirs)
        os.close(theirs)
        self._numbers[pid] = number
        output = self._outputs[pid] = LogRelay(ours, f"worker {number} (process {pid})")
        self._listen(ours, lambda: None if output.read() else self._silence(output))
        self._report(Started(number, pid))

    def _silence(self, output: LogRelay) -> None:
        if self._handlers.pop(output.fd, None) is not None:
            self._poll.unregister(output.fd)
            os.close(output.fd)

    def _report(self, report: Started | Gone) -> None:
        try:
            self._control.send(msgspec.msgpack.encode(report))
        except OSError:
            self._open = False

    # Exited children.

    def _reap(self) -> None:
        """Reap exited workers and kill their process groups and adopted orphans."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._deaths, 4096)
        while (pid := _dead_child()) is not None:
            number = self._numbers.pop(pid, None)
            if number is not None:
                _kill_group(pid)  # before reaping: until then the pid cannot be reused
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
        give_up = time.monotonic() + _SHUTDOWN_SECONDS
        while time.monotonic() < give_up:
            self._reap()
            try:
                if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    time.sleep(0.01)
            except ChildProcessError:
                return


def _dead_child() -> int | None:
    try:
        child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if child is None else child.si_pid


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        _kill(pid)  # it has not made its group yet


def _run_worker(forkserver: int, connection: int, status: int, output: int) -> NoReturn:
    """In the forked process: release the fork server's resources and serve requests."""
    code = 71
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        linux.die_with(forkserver)
        linux.adopt_orphans()
        os.dup2(output, 1)
        os.dup2(output, 2)
        page = StatusPage(status)
        own = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, _HIGH)
        os.closerange(3, own)
        os.closerange(own + 1, 1 << 20)
        faulthandler.enable()
        np.random.seed()  # otherwise environments that use the global RNG draw the same in every worker
        work(socket.socket(fileno=own), page)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Run the fork server on the socket whose descriptor is the first argument.

    Further arguments name environment variables to remove before environments run.
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
        ForkServer(control).run()


if __name__ == "__main__":
    main()
