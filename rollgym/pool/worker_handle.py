"""Handle of one worker process in the pool: socket, leases and status page."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

import msgspec

from rollgym.core.errors import EnvError, WorkerLost
from rollgym.core.types import EpisodeSpec, Failure
from rollgym.pool import linux
from rollgym.pool import status_page as status_page
from rollgym.pool.base import LeaseLost
from rollgym.pool.forkserver_client import ForkServerClient
from rollgym.pool.health import WorkerFailure
from rollgym.pool.protocol import (
    Acted,
    Answer,
    Began,
    Ended,
    Failed,
    Hello,
    Ready,
    Unpacker,
    decode_answers,
    encode,
    frame,
    take,
)
from rollgym.pool.session import LocalSession

_PIECE = 1 << 18


class WorkerHandle:
    """One worker process. ``on_end`` is called when a lease has ended."""

    def __init__(
        self, number: int, hello: Hello, on_end: Callable[[WorkerHandle], None], clock: float
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
        self._unpacker = Unpacker()
        self._outbox: list[bytes] = []
        self._flushing = False
        self._unsent = bytearray()
        self.loop.add_reader(self._socket, self._readable)
        self.post(encode(hello))

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
            self._send(frame(take(self._outbox)))

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
                for answer in decode_answers(body):
                    self._read_reply(answer)
        except (ValueError, msgspec.MsgspecError):
            self._on_disconnect()  # malformed data: the stream cannot be decoded any more
            return False
        return True

    def _on_disconnect(self) -> None:
        self.loop.remove_reader(self._socket)
        self.disconnected_at = self.clock

    def _read_reply(self, answer: Answer) -> None:
        if isinstance(answer, Ready):
            self._start(answer.error)
            return
        session = self.sessions.get(answer.lease)
        if session is None:
            return
        if isinstance(answer, Acted):
            session.grown_mb += answer.grown_mb
            session.answer(answer.step)
        elif isinstance(answer, Began):
            session.grown_mb += answer.grown_mb
            session.answer(answer.reset)
        elif isinstance(answer, Failed):
            session.fail(_as_error(answer.error, lost=answer.lost))
        elif isinstance(answer, Ended):
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
