"""A worker process: hosts many environments and answers requests until its pool goes away.

A service thread reads requests and hands each to the thread of its environment (`rollgym.pool.lanes`), so
that calls to different environments overlap and those to one do not. The main thread is left to environments
that need it. The keeper (`rollgym.pool.keeper`) forks workers and calls `work` in them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from dataclasses import replace
from functools import partial

from rollgym.deadline import start_call
from rollgym.errors import EnvError, RollgymError, WorkerLost, one_line
from rollgym.failures import failure_of
from rollgym.pool import linux
from rollgym.pool.board import Board
from rollgym.pool.host import Hosted, Shelf, kind_of
from rollgym.pool.lanes import Lane, Lanes, Seat, Thread, die, thread_for
from rollgym.pool.pulse import Pulse
from rollgym.pool.wire import (
    MAX_MESSAGE,
    Act,
    Acted,
    Began,
    Begin,
    End,
    Ended,
    Failed,
    Hello,
    Ready,
    Request,
    Unpacker,
    decode_requests,
    encode,
    frame,
    take,
)
from rollgym.registry import import_module, load_plugins
from rollgym.types import Failure

_HOLD = 0.001
"""How long an answer may wait for others to travel with."""
_MAX_WORDS = 100_000
"""Characters of an error's message and traceback that travel."""
_CLOSING = 1.5
"""Seconds for all environments to close when the pool goes away."""


class Server:
    """Answers the requests of one pool. Its methods run in the service thread unless they say otherwise."""

    def __init__(self, connection: socket.socket, board: Board, hello: Hello) -> None:
        self.lanes = Lanes(board)
        self.post = Post(connection)
        self._connection = connection
        self._board = board
        self._seats: dict[int, Seat] = {}
        self._shelf: Shelf[Seat] = Shelf()
        self._threads: dict[bytes, Thread] = {}
        self._weigh = hello.weigh
        self._seconds = {Begin: hello.reset_seconds, Act: hello.step_seconds}
        self._forked = False
        self._read = 0.0
        os.register_at_fork(after_in_child=self._in_child)

    def serve(self, unpacker: Unpacker) -> None:
        """Answer requests until the pool closes the connection."""
        try:
            while data := self._connection.recv(1 << 18):
                self._read = time.perf_counter()
                for body in unpacker.feed(data):
                    for request in decode_requests(body):
                        self._dispatch(request)
                self.post.flush()
        except ConnectionError:
            pass
        except BaseException:
            die()
        self._close_all()

    def _dispatch(self, request: Request) -> None:
        if isinstance(request, End):
            self._end(request)
            return
        assert isinstance(request, (Begin, Act))
        seat = self._seats.get(request.lease) or self._sit(request)
        lane = self._lane_for(seat, request)
        if lane is None:
            self._call_here(seat, request)
        else:
            seat.busy = True
            lane.post(partial(self._call_there, lane, seat, request))

    def _sit(self, request: Begin | Act) -> Seat:
        assert isinstance(request, Begin), "a lease begins with its spec"
        kind = kind_of(request.spec)
        seat = self._shelf.take(kind) or Seat(kind, self._threads.get(kind))
        self._seats[request.lease] = seat
        return seat

    def _lane_for(self, seat: Seat, request: Begin | Act) -> Lane | None:
        """Where the call is made; ``None`` is here and now."""
        if seat.thread == "any" and not seat.busy and seat.trust[type(request)].given():
            return None
        if seat.lane is None:
            seat.lane = self.lanes.main if seat.thread == "main" else self.lanes.new()
        return seat.lane

    def _call_here(self, seat: Seat, request: Begin | Act) -> None:
        began = time.perf_counter()
        self.post.add(self._call(self.lanes.service, seat, request))
        now = time.perf_counter()
        seat.trust[type(request)].took(now - began)
        if now - self._read > _HOLD:
            self.post.flush()
            self._read = now

    def _call_there(self, lane: Lane, seat: Seat, request: Begin | Act) -> None:
        """In the lane's thread."""
        if seat.thread is None:
            self._look_at_class(lane, seat, request)
        if seat.lane is not lane and seat.lane is not None:  # moved to the main one
            seat.lane.post(partial(self._call_there, seat.lane, seat, request))
            return
        answer = self._call(lane, seat, request)
        seat.busy = False
        self.post.send(answer)

    def _look_at_class(self, lane: Lane, seat: Seat, request: Begin | Act) -> None:
        """In the lane's thread, since it may have to import the class."""
        assert isinstance(request, Begin)
        lane.call = seat, request
        self._board.enter(lane.slot, request.lease)
        try:
            seat.thread = thread_for(request.spec)
        except BaseException:
            seat.thread = "own"  # making the environment will fail too, and say why
        self._board.leave(lane.slot)
        self._threads[seat.kind] = seat.thread
        if seat.thread == "main":
            seat.lane = self.lanes.main

    def _call(self, lane: Lane, seat: Seat, request: Begin | Act) -> bytes:
        """Make a call to an environment, in whichever thread; whatever goes wrong is an answer."""
        lane.call = seat, request
        before = linux.most_mb() if self._weigh else 0.0
        self._board.enter(lane.slot, request.lease, before)
        start_call(self._seconds[type(request)])
        try:
            done = _perform(seat, request)
            if self._weigh:
                done.grown_mb = linux.most_mb() - before
            answer = encode(done)
            if len(answer) > MAX_MESSAGE:
                raise EnvError(f"the environment said {len(answer)} bytes at once, more than {MAX_MESSAGE}")
        except BaseException as error:
            answer = encode(Failed(request.lease, _as_failure(error), isinstance(error, WorkerLost)))
        if self._forked:
            os._exit(0)  # a child that came back from the environment's code: only one may answer
        self._board.leave(lane.slot)
        return answer

    def _end(self, request: End) -> None:
        seat = self._seats.pop(request.lease, None)
        if seat is None:
            self.post.add(encode(Ended(request.lease)))  # given up before it began
        elif request.healthy:
            self.post.add(encode(Ended(request.lease)))
            unwanted = self._shelf.put(seat)
            if unwanted is not None:
                self._throw_away(unwanted, 0)
        else:
            self._throw_away(seat, request.lease)

    def _throw_away(self, seat: Seat, lease: int) -> None:
        """Close an environment where it was called, after whatever is still running in it."""
        if seat.lane is None:
            self._close(self.lanes.service, seat, lease)
        else:
            seat.lane.post(partial(self._close, seat.lane, seat, lease))

    def _close(self, lane: Lane, seat: Seat, lease: int) -> None:
        """In the lane's thread."""
        if seat.lane is not lane and seat.lane is not None:  # moved to the main one
            seat.lane.post(partial(self._close, seat.lane, seat, lease))
            return
        if seat.hosted is not None:
            lane.call = seat, None
            self._board.enter(lane.slot, lease)
            with contextlib.suppress(BaseException):
                seat.hosted.close()
            self._board.leave(lane.slot)
        if lease:
            self.post.send(encode(Ended(lease)))
        self.lanes.end(lane)

    def _close_all(self) -> None:
        # Whatever hangs now does so for a bounded time.
        threading.Timer(_CLOSING, os._exit, [0]).start()
        for seat in (*self._seats.values(), *self._shelf.clear()):
            self._throw_away(seat, 0)
        self.lanes.end_all()

    def _in_child(self) -> None:
        """In a process an environment forked: nothing of the worker's is its business."""
        self._forked = True
        self._board.forget()
        os.close(self._connection.fileno())


class Post:
    """Sends answers, as many at once as are ready. Any thread may use it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outbox: list[bytes] = []
        self.add = self._outbox.append
        """Leave an answer for the next `flush`."""
        self._sending = threading.Lock()

    def send(self, answer: bytes) -> None:
        """Send an answer, and what else is there."""
        self._outbox.append(answer)
        self.flush()

    def flush(self) -> None:
        """Send what is there. Where somebody is sending already, that one sends this too."""
        while self._outbox and self._sending.acquire(blocking=False):
            try:
                if self._outbox:
                    self._connection.sendall(frame(take(self._outbox)))
            except ConnectionError:
                self._outbox.clear()  # the pool is gone; the service thread finds out too
            except OSError:
                die()  # an environment closed our socket
            finally:
                self._sending.release()


def _perform(seat: Seat, request: Begin | Act) -> Began | Acted:
    if isinstance(request, Begin):
        seat.episode = request.spec.episode_id
        if seat.thread not in ("own", "any", "main"):
            raise EnvError(f"pool_thread is {seat.thread!r}; it must be 'own', 'any' or 'main'")
        if seat.hosted is None:
            seat.hosted = Hosted(request.spec)
        return Began(request.lease, seat.hosted.begin(request.spec))
    if seat.hosted is None:
        raise EnvError("the environment was never made")
    return Acted(request.lease, seat.hosted.step(request.action))


def _as_failure(error: BaseException) -> Failure:
    if not isinstance(error, Exception):
        named = EnvError(f"the environment raised {one_line(error)}")
        named.__cause__ = error
        error = named
    failure = failure_of(error)
    return replace(failure, message=failure.message[:_MAX_WORDS], traceback=failure.traceback[-_MAX_WORDS:])


def start(hello: Hello) -> Ready:
    """Get ready to make environments: the pool's module path, and modules that register some."""
    sys.path[:] = hello.path
    try:
        load_plugins()  # here, since it is not made for several threads
        for module in hello.modules:
            import_module(module)
    except RollgymError as error:
        return Ready(failure_of(error))
    return Ready(None)


def work(connection: socket.socket, board: Board) -> None:
    """Be a worker on this connection. Returns when the pool has closed it."""
    unpacker = Unpacker()
    pulse = Pulse(board)
    pulse.start()
    hello = _first_request(connection, unpacker)
    if not isinstance(hello, Hello):
        return
    server = Server(connection, board, hello)
    server.post.send(encode(start(hello)))
    pulse.watch(server.lanes, hello)
    threading.Thread(target=server.serve, args=(unpacker,), name="service", daemon=True).start()
    server.lanes.main.run()


def _first_request(connection: socket.socket, unpacker: Unpacker) -> Request | None:
    while data := connection.recv(1 << 16):
        for body in unpacker.feed(data):
            return decode_requests(body)[0]
    return None
