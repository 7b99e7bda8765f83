"""The pool's side of worker processes: client of the fork server, sessions, and a handle for each worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from rollgym.core.errors import EnvError, RollgymError, UsageError, WorkerLost
from rollgym.core.serialization import clean_text
from rollgym.core.types import EpisodeSpec, Failure
from rollgym.pool import linux, protocol, status_page
from rollgym.pool.base import EnvSession, LeaseLost, Reset, Step
from rollgym.pool.health import WorkerFailure
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


Op = Literal["reset", "step", "close"]


class LocalSession(EnvSession):
    """One lease in a worker process. The environment is made (or taken from the idle ones) by `reset`."""

    __slots__ = (
        "_lease", "_lost", "_open", "_spec", "_waiter", "_worker", "asked_at", "grown_mb", "healthy", "op",
    )  # fmt: skip

    def __init__(self, worker: WorkerHandle, lease: int, spec: EpisodeSpec) -> None:
        self._worker = worker
        self._lease = lease
        self._spec = spec
        self._open = True
        self._lost: LeaseLost | None = None
        self._waiter: asyncio.Future[Any] | None = None
        self.healthy = True
        self.grown_mb = 0.0
        """Memory growth of the worker during the episode's calls in MB, where measured."""
        self.op: Op = "reset"
        """Last call."""
        self.asked_at: float | None = None
        """Time of the pending call on the worker's clock; ``None`` if there is none."""

    @property
    def episode(self) -> str:
        """The id of the episode that has the lease."""
        return self._spec.episode_id

    async def reset(self) -> Reset:
        """Start the episode."""
        self.op = "reset"
        result: Reset = await self._ask(protocol.encode(protocol.Begin(self._lease, self._spec)))
        return result

    async def step(self, action: str) -> Step:
        """Play one action."""
        self.op = "step"
        result: Step = await self._ask(protocol.encode(protocol.Act(self._lease, clean_text(action))))
        return result

    async def close(self) -> None:
        """Return the environment to the pool."""
        if self._open:
            self._open = False
            self._worker.in_use -= 1
            if self.asked_at is None:  # otherwise a cancelled call still runs, and closing waits for it
                self.op = "close"
            if self._lost is None:
                self.asked_at = self._worker.clock
                self._worker.post(protocol.encode(protocol.End(self._lease, self.healthy)))

    async def _ask(self, message: bytes) -> Any:
        if self._lost is not None:
            raise self._lost
        if not self._open or self.asked_at is not None:
            raise UsageError("A session accepts one call at a time, and none after close().")
        worker = self._worker
        waiter = self._waiter = worker.loop.create_future()
        self.asked_at = worker.clock
        # Not healthy until the answer arrives: a cancelled call also leaves the environment mid-episode.
        self.healthy = False
        worker.post(message)
        try:
            result = await waiter
        finally:
            self._waiter = None
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # mark as retrieved, even if a cancellation came first
        self.healthy = True
        return result

    # Called by the worker handle.

    def answer(self, result: Reset | Step | None) -> None:
        """Deliver the answer; dropped if the call was cancelled."""
        self._answered()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(result)

    def fail(self, error: RollgymError) -> None:
        """Fail the pending call."""
        self._answered()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _answered(self) -> None:
        if self._open:
            self.asked_at = None
        else:
            self.op = "close"

    def lose(self, error: LeaseLost) -> None:
        """Fail the pending call and every later one: the worker is lost."""
        self._lost = error
        self.fail(error)


_PIECE = 1 << 18


class WorkerHandle:
    """One worker process. ``on_end`` is called when a lease has ended."""

    def __init__(
        self, number: int, hello: protocol.Hello, on_end: Callable[[WorkerHandle], None], clock: float
    ) -> None:
        self.number = number
        self.loop = asyncio.get_running_loop()
        self._socket, self._theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._status_fd = status_page.create()
        self.status = status_page.StatusPage(self._status_fd)
        self.sessions: dict[int, LocalSession] = {}
        self.opened = 0
        """Leases handed out so far."""
        self.in_use = 0
        """Leases handed out and not returned; a returned environment may still be closing."""
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.pid: int | None = None
        self.gauge: int | None = None
        self.failure: WorkerFailure | None = None
        """Why it is being killed or has died; it takes no more calls."""
        self.leaving: str | None = None
        """Why it takes no more leases; it stops when the last one has ended."""
        self.killed_at: float | None = None
        """Time of the kill order."""
        self.closed_at: float | None = None
        """Time at which the pool closed the connection."""
        self.clock = clock
        """Seconds measured by the pool; stands still while the event loop is blocked."""
        self.since = clock
        """Start time, later the time it became idle, on that clock."""
        self.beat = 0
        self.beat_seen = 0.0
        self.disconnected_at: float | None = None
        """Time at which the worker closed the connection; the fork server reports its exit shortly after."""
        self._on_end = on_end
        self._unpacker = protocol.Unpacker()
        self._outbox: list[bytes] = []
        self._flushing = False
        self._unsent = bytearray()
        self.loop.add_reader(self._socket, self._readable)
        self.post(protocol.encode(hello))

    def launch(self, forkserver: ForkServerClient) -> None:
        """Start the process."""
        with self._theirs:
            forkserver.launch(self.number, self._theirs, self._status_fd)
        os.close(self._status_fd)

    def started(self, pid: int) -> None:
        """Record that the process has started."""
        self.pid = pid
        self.gauge = linux.open_memory_gauge(pid)

    # Leases.

    def takes_leases(self, most: int | None) -> bool:
        """Whether the worker can take one more lease."""
        if self.failure is not None or self.leaving is not None or self.disconnected_at is not None:
            return False
        return most is None or len(self.sessions) < most

    def lease(self, number: int, spec: EpisodeSpec) -> LocalSession:
        """Open a lease in this worker."""
        session = self.sessions[number] = LocalSession(self, number, spec)
        self.opened += 1
        self.in_use += 1
        return session

    # Sending: messages queued in one iteration of the event loop are sent together.

    def post(self, message: bytes) -> None:
        """Queue an encoded message."""
        self._outbox.append(message)
        if not self._flushing:
            self._flushing = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        while self._outbox:
            self._send(protocol.frame(protocol.take(self._outbox)))

    def _send(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it exited; the fork server reports how
        if sent < len(data):
            self._unsent += data[sent:]
            self.loop.add_writer(self._socket, self._writable)

    def _writable(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self.loop.remove_writer(self._socket)

    # Receiving.

    def _readable(self) -> bool:
        """Read available data; return False if there is none."""
        try:
            data = self._socket.recv(_PIECE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._on_disconnect()
            return False
        try:
            for body in self._unpacker.feed(data):
                for answer in protocol.decode_answers(body):
                    self._read_reply(answer)
        except (ValueError, msgspec.MsgspecError):
            self._on_disconnect()  # malformed data: the stream cannot be decoded any more
            return False
        return True

    def _on_disconnect(self) -> None:
        self.loop.remove_reader(self._socket)
        self.disconnected_at = self.clock

    def _read_reply(self, answer: protocol.Answer) -> None:
        if isinstance(answer, protocol.Ready):
            self._start(answer.error)
            return
        session = self.sessions.get(answer.lease)
        if session is None:
            return
        if isinstance(answer, protocol.Acted):
            session.grown_mb += answer.grown_mb
            session.answer(answer.step)
        elif isinstance(answer, protocol.Began):
            session.grown_mb += answer.grown_mb
            session.answer(answer.reset)
        elif isinstance(answer, protocol.Failed):
            session.fail(_as_error(answer.error, lost=answer.lost))
        elif isinstance(answer, protocol.Ended):
            self.end(answer.lease)

    def _start(self, error: Failure | None) -> None:
        if not self.ready.done():
            if error is None:
                self.ready.set_result(None)
            else:
                self.leaving = "modules"
                self.ready.set_exception(_as_error(error))

    def end(self, lease: int) -> None:
        """Forget a lease."""
        if self.sessions.pop(lease, None) is not None:
            self.since = self.clock
            self._on_end(self)

    # Shutdown.

    def disconnect(self) -> None:
        """Close the connection: the worker then closes its environments and exits."""
        if self.closed_at is not None:
            return
        self.closed_at = self.clock
        self.loop.remove_reader(self._socket)
        self.loop.remove_writer(self._socket)
        with contextlib.suppress(OSError):
            # close() alone has no effect while a forked process holds a copy.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def dismiss(self) -> None:
        """End every lease now and disconnect."""
        for session in self.sessions.values():
            session.lose(LeaseLost("the pool was closed", reason="closed"))
        self.sessions.clear()
        self.disconnect()

    def reap(self, failure: WorkerFailure, output: str) -> None:
        """The process has exited: read its last answers, then fail every lease."""
        if self.closed_at is None:
            while self._readable():
                pass
            self.disconnect()
        running = {call.lease for call in self.status.running()}
        for lease, error in failure.errors(self.sessions, running, output).items():
            self.sessions[lease].lose(error)
        self.sessions.clear()
        if not self.ready.done():
            self.ready.set_exception(failure.error(output))
        self.status.close()
        if self.gauge is not None:
            os.close(self.gauge)
            self.gauge = None

    def memory_mb(self) -> float:
        """Resident memory of the process."""
        return linux.resident_mb(self.gauge)


def _as_error(failure: Failure, *, lost: bool = False) -> EnvError | WorkerLost:
    error = WorkerLost(failure.message) if lost else EnvError(failure.message)
    error.failure = failure
    return error
