"""The pool's end of one worker process: the socket, the leases, the shared page."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

import msgspec

from rollgym.errors import EnvError, WorkerLost
from rollgym.pool import LeaseLost, linux
from rollgym.pool import board as boards
from rollgym.pool.keeping import KeeperLink
from rollgym.pool.session import LocalSession
from rollgym.pool.verdict import Verdict
from rollgym.pool.wire import (
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
from rollgym.types import EpisodeSpec, Failure

_PIECE = 1 << 18


class Worker:
    """One worker process. ``on_end`` is called when a lease has ended."""

    def __init__(self, number: int, hello: Hello, on_end: Callable[[Worker], None], clock: float) -> None:
        self.number = number
        self.loop = asyncio.get_running_loop()
        self._socket, self._theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._board_fd = boards.create()
        self.board = boards.Board(self._board_fd)
        self.sessions: dict[int, LocalSession] = {}
        self.opened = 0
        """Leases handed out so far."""
        self.in_use = 0
        """Leases handed out and not given back; what is given back may still have to be closed."""
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.pid: int | None = None
        self.gauge: int | None = None
        self.verdict: Verdict | None = None
        """Why it is dying or dead; it takes no more calls."""
        self.leaving: str | None = None
        """Why it takes no more leases, and stops when the last has ended."""
        self.condemned: float | None = None
        """When its death was ordered."""
        self.hung_up: float | None = None
        """When the connection was closed by the pool."""
        self.clock = clock
        """Seconds that the pool has paid attention; it stands still while the event loop is blocked."""
        self.since = clock
        """When it started, and later when it became idle, on that clock."""
        self.beat = 0
        self.beat_seen = 0.0
        self.deaf: float | None = None
        """When the connection ended; the keeper should say within moments how the process did."""
        self._on_end = on_end
        self._unpacker = Unpacker()
        self._outbox: list[bytes] = []
        self._flushing = False
        self._unsent = bytearray()
        self.loop.add_reader(self._socket, self._readable)
        self.say(encode(hello))

    def launch(self, keeper: KeeperLink) -> None:
        """Have the process started."""
        with self._theirs:
            keeper.launch(self.number, self._theirs, self._board_fd)
        os.close(self._board_fd)

    def started(self, pid: int) -> None:
        """The process is there."""
        self.pid = pid
        self.gauge = linux.open_memory_gauge(pid)

    # Leases.

    def takes_leases(self, most: int | None) -> bool:
        """Whether one more lease may go here."""
        if self.verdict is not None or self.leaving is not None or self.deaf is not None:
            return False
        return most is None or len(self.sessions) < most

    def lease(self, number: int, spec: EpisodeSpec) -> LocalSession:
        """A new lease in this worker."""
        session = self.sessions[number] = LocalSession(self, number, spec)
        self.opened += 1
        self.in_use += 1
        return session

    # Sending: what is said within one turn of the event loop travels together.

    def say(self, message: bytes) -> None:
        """Send a message that is encoded already."""
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
            return  # it is dead, and the keeper will say how
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

    # Hearing.

    def _readable(self) -> bool:
        """Take in a piece; False where there is none."""
        try:
            data = self._socket.recv(_PIECE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._deafen()
            return False
        try:
            for body in self._unpacker.feed(data):
                for answer in decode_answers(body):
                    self._hear(answer)
        except (ValueError, msgspec.MsgspecError):
            self._deafen()  # nonsense: nothing it says can be trusted any more
            return False
        return True

    def _deafen(self) -> None:
        self.loop.remove_reader(self._socket)
        self.deaf = self.clock

    def _hear(self, answer: Answer) -> None:
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

    # The end.

    def hang_up(self) -> None:
        """Close the connection: the worker then closes its environments and exits."""
        if self.hung_up is not None:
            return
        self.hung_up = self.clock
        self.loop.remove_reader(self._socket)
        self.loop.remove_writer(self._socket)
        with contextlib.suppress(OSError):
            # Closing alone would not do where a process that we forked has a copy.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def dismiss(self) -> None:
        """End every lease now, then hang up."""
        for session in self.sessions.values():
            session.lose(LeaseLost("the pool was closed", reason="closed"))
        self.sessions.clear()
        self.hang_up()

    def bury(self, verdict: Verdict, output: str) -> None:
        """The process is gone: hear what it said last, then tell every lease."""
        if self.hung_up is None:
            while self._readable():
                pass
            self.hang_up()
        running = {call.lease for call in self.board.running()}
        for lease, error in verdict.errors(self.sessions, running, output).items():
            self.sessions[lease].lose(error)
        self.sessions.clear()
        if not self.ready.done():
            self.ready.set_exception(verdict.error(output))
        self.board.close()
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
