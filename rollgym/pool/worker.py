"""Worker process: hosts many environments and answers requests until its pool exits.

A service thread reads requests and hands each to the thread of its environment (`rollgym.pool.threads`), so
that calls to different environments overlap and those to one do not. The main thread is left to environments
that need it. The fork server (`rollgym.pool.forkserver`) forks workers and calls `work` in them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from functools import partial

from rollgym.core.deadline import start_call
from rollgym.core.errors import EnvError, RollgymError, WorkerLost, one_line
from rollgym.core.failures import failure_of
from rollgym.core.registry import import_module, load_plugins
from rollgym.core.types import Failure
from rollgym.pool import linux
from rollgym.pool.hosted_env import HostedEnv, IdleEnvs, kind_of
from rollgym.pool.protocol import (
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
from rollgym.pool.status_page import Running, StatusPage
from rollgym.pool.threads import EnvSlot, EnvThread, EnvThreads, Thread, die, thread_for

_EVERY = 0.5
_WARN_FRACTION = 0.8
"""Fraction of its time limit after which a call is reported."""


class Heartbeat(threading.Thread):
    """Thread that records heartbeats as long as the interpreter runs."""

    def __init__(self, status: StatusPage) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._status = status
        self._every = _EVERY
        self._env_threads: EnvThreads | None = None
        self._limits = (0.0, 0.0)
        self._reported: set[int] = set()

    def watch(self, env_threads: EnvThreads, hello: Hello) -> None:
        """Report slow calls of these threads from now on."""
        self._limits = hello.reset_seconds, hello.step_seconds
        self._every = min(_EVERY, *(limit / 10 for limit in self._limits))
        self._env_threads = env_threads

    def run(self) -> None:
        """Record heartbeats until the process exits."""
        while True:
            self._status.beat()
            if self._env_threads is not None:
                self._check_calls(self._env_threads)
            time.sleep(self._every)

    def _check_calls(self, env_threads: EnvThreads) -> None:
        running = self._status.running()
        self._reported &= {call.lease for call in running}
        for call in running:
            if call.seconds > _WARN_FRACTION * min(self._limits) and call.lease not in self._reported:
                for env_thread in env_threads.all():
                    if env_thread.slot == call.slot:
                        self._report_slow_call(env_thread, call)

    def _report_slow_call(self, env_thread: EnvThread, call: Running) -> None:
        if env_thread.call is None:
            return
        env_slot, request = env_thread.call
        begins = isinstance(request, Begin)
        if call.seconds < _WARN_FRACTION * self._limits[0 if begins else 1]:
            return
        self._reported.add(call.lease)
        method = "reset()" if begins else "close()" if request is None else "step()"
        frame = sys._current_frames().get(env_thread.ident)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        episode = env_slot.episode
        text = f"rollgym: {method} of episode {episode} has been running for {call.seconds:.1f} s:\n{stack}"
        with contextlib.suppress(OSError):  # an environment may have closed stderr
            os.write(2, text.encode("utf-8", "replace"))


_MAX_HOLD = 0.001
"""Seconds for which an answer may be held back to be sent together with others."""
_MAX_ERROR_CHARS = 100_000
"""Maximum characters of an error's message and traceback that are sent."""
_CLOSING = 1.5
"""Seconds for all environments to close when the pool exits."""


class WorkerServer:
    """Answers the requests of one pool. Methods run in the service thread unless documented otherwise."""

    def __init__(self, connection: socket.socket, status: StatusPage, hello: Hello) -> None:
        self.env_threads = EnvThreads(status)
        self.post = Outbox(connection)
        self._connection = connection
        self._status = status
        self._env_slots: dict[int, EnvSlot] = {}
        self._idle_envs: IdleEnvs[EnvSlot] = IdleEnvs()
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
        env_slot = self._env_slots.get(request.lease) or self._claim_slot(request)
        env_thread = self._env_thread_for(env_slot, request)
        if env_thread is None:
            self._call_inline(env_slot, request)
        else:
            env_slot.busy = True
            env_thread.post(partial(self._call_in_thread, env_thread, env_slot, request))

    def _claim_slot(self, request: Begin | Act) -> EnvSlot:
        assert isinstance(request, Begin), "a lease begins with its spec"
        kind = kind_of(request.spec)
        env_slot = self._idle_envs.take(kind) or EnvSlot(kind, self._threads.get(kind))
        self._env_slots[request.lease] = env_slot
        return env_slot

    def _env_thread_for(self, env_slot: EnvSlot, request: Begin | Act) -> EnvThread | None:
        """Return the thread that makes the call; ``None`` means inline in the service thread."""
        if (
            env_slot.thread == "any"
            and not env_slot.busy
            and env_slot.inline_budget[type(request)].allows_inline()
        ):
            return None
        if env_slot.env_thread is None:
            env_slot.env_thread = (
                self.env_threads.main if env_slot.thread == "main" else self.env_threads.new()
            )
        return env_slot.env_thread

    def _call_inline(self, env_slot: EnvSlot, request: Begin | Act) -> None:
        began = time.perf_counter()
        self.post.add(self._call(self.env_threads.service, env_slot, request))
        now = time.perf_counter()
        env_slot.inline_budget[type(request)].record(now - began)
        if now - self._read > _MAX_HOLD:
            self.post.flush()
            self._read = now

    def _call_in_thread(self, env_thread: EnvThread, env_slot: EnvSlot, request: Begin | Act) -> None:
        """Runs in the environment's thread."""
        if env_slot.thread is None:
            self._read_thread_setting(env_thread, env_slot, request)
        if env_slot.env_thread is not env_thread and env_slot.env_thread is not None:  # moved to the main one
            env_slot.env_thread.post(partial(self._call_in_thread, env_slot.env_thread, env_slot, request))
            return
        answer = self._call(env_thread, env_slot, request)
        env_slot.busy = False
        self.post.send(answer)

    def _read_thread_setting(self, env_thread: EnvThread, env_slot: EnvSlot, request: Begin | Act) -> None:
        """Runs in the environment's thread, since it may have to import the class."""
        assert isinstance(request, Begin)
        env_thread.call = env_slot, request
        self._status.enter(env_thread.slot, request.lease)
        try:
            env_slot.thread = thread_for(request.spec)
        except BaseException:
            env_slot.thread = "own"  # making the environment fails too, with the reason
        self._status.leave(env_thread.slot)
        self._threads[env_slot.kind] = env_slot.thread
        if env_slot.thread == "main":
            env_slot.env_thread = self.env_threads.main

    def _call(self, env_thread: EnvThread, env_slot: EnvSlot, request: Begin | Act) -> bytes:
        """Call an environment in the current thread and encode the result or the error."""
        env_thread.call = env_slot, request
        before = linux.peak_mb() if self._weigh else 0.0
        self._status.enter(env_thread.slot, request.lease, before)
        start_call(self._seconds[type(request)])
        try:
            done = _perform(env_slot, request)
            if self._weigh:
                done.grown_mb = linux.peak_mb() - before
            answer = encode(done)
            if len(answer) > MAX_MESSAGE:
                raise EnvError(
                    f"the environment returned {len(answer)} bytes in one call; the limit is {MAX_MESSAGE}"
                )
        except BaseException as error:
            answer = encode(Failed(request.lease, _as_failure(error), isinstance(error, WorkerLost)))
        if self._forked:
            os._exit(0)  # a child forked by the environment's code: only the parent may answer
        self._status.leave(env_thread.slot)
        return answer

    def _end(self, request: End) -> None:
        env_slot = self._env_slots.pop(request.lease, None)
        if env_slot is None:
            self.post.add(encode(Ended(request.lease)))  # cancelled before it began
        elif request.healthy:
            self.post.add(encode(Ended(request.lease)))
            unwanted = self._idle_envs.put(env_slot)
            if unwanted is not None:
                self._discard(unwanted, 0)
        else:
            self._discard(env_slot, request.lease)

    def _discard(self, env_slot: EnvSlot, lease: int) -> None:
        """Close an environment in its own thread, after calls that are still running."""
        if env_slot.env_thread is None:
            self._close(self.env_threads.service, env_slot, lease)
        else:
            env_slot.env_thread.post(partial(self._close, env_slot.env_thread, env_slot, lease))

    def _close(self, env_thread: EnvThread, env_slot: EnvSlot, lease: int) -> None:
        """Runs in the environment's thread."""
        if env_slot.env_thread is not env_thread and env_slot.env_thread is not None:  # moved to the main one
            env_slot.env_thread.post(partial(self._close, env_slot.env_thread, env_slot, lease))
            return
        if env_slot.hosted is not None:
            env_thread.call = env_slot, None
            self._status.enter(env_thread.slot, lease)
            with contextlib.suppress(BaseException):
                env_slot.hosted.close()
            self._status.leave(env_thread.slot)
        if lease:
            self.post.send(encode(Ended(lease)))
        self.env_threads.end(env_thread)

    def _close_all(self) -> None:
        # Bounds the time that a hanging environment can delay the exit.
        threading.Timer(_CLOSING, os._exit, [0]).start()
        for env_slot in (*self._env_slots.values(), *self._idle_envs.clear()):
            self._discard(env_slot, 0)
        self.env_threads.end_all()

    def _in_child(self) -> None:
        """In a process that an environment forked: detach from the worker's connection and status page."""
        self._forked = True
        self._status.forget()
        os.close(self._connection.fileno())


class Outbox:
    """Sends answers, batching all that are ready. Thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._outbox: list[bytes] = []
        self.add = self._outbox.append
        """Queue an answer for the next `flush`."""
        self._sending = threading.Lock()

    def send(self, answer: bytes) -> None:
        """Send an answer and everything queued."""
        self._outbox.append(answer)
        self.flush()

    def flush(self) -> None:
        """Send everything queued. A thread that is already sending also sends what is queued meanwhile."""
        while self._outbox and self._sending.acquire(blocking=False):
            try:
                if self._outbox:
                    self._connection.sendall(frame(take(self._outbox)))
            except ConnectionError:
                self._outbox.clear()  # the pool exited; the service thread notices too
            except OSError:
                die()  # an environment closed our socket
            finally:
                self._sending.release()


def _perform(env_slot: EnvSlot, request: Begin | Act) -> Began | Acted:
    if isinstance(request, Begin):
        env_slot.episode = request.spec.episode_id
        if env_slot.thread not in ("own", "any", "main"):
            raise EnvError(f"pool_thread is {env_slot.thread!r}; it must be 'own', 'any' or 'main'")
        if env_slot.hosted is None:
            env_slot.hosted = HostedEnv(request.spec)
        return Began(request.lease, env_slot.hosted.begin(request.spec))
    if env_slot.hosted is None:
        raise EnvError("the environment was never made")
    return Acted(request.lease, env_slot.hosted.step(request.action))


def _as_failure(error: BaseException) -> Failure:
    if not isinstance(error, Exception):
        named = EnvError(f"the environment raised {one_line(error)}")
        named.__cause__ = error
        error = named
    failure = failure_of(error)
    return replace(
        failure, message=failure.message[:_MAX_ERROR_CHARS], traceback=failure.traceback[-_MAX_ERROR_CHARS:]
    )


def start(hello: Hello) -> Ready:
    """Set the pool's module path and import the modules that register environments."""
    sys.path[:] = hello.path
    try:
        load_plugins()  # here, since it is not thread-safe
        for module in hello.modules:
            import_module(module)
    except RollgymError as error:
        return Ready(failure_of(error))
    return Ready(None)


def work(connection: socket.socket, status: StatusPage) -> None:
    """Serve requests on this connection until the pool closes it."""
    unpacker = Unpacker()
    heartbeat = Heartbeat(status)
    heartbeat.start()
    hello = _first_request(connection, unpacker)
    if not isinstance(hello, Hello):
        return
    server = WorkerServer(connection, status, hello)
    server.post.send(encode(start(hello)))
    heartbeat.watch(server.env_threads, hello)
    threading.Thread(target=server.serve, args=(unpacker,), name="service", daemon=True).start()
    server.env_threads.main.run()


def _first_request(connection: socket.socket, unpacker: Unpacker) -> Request | None:
    while data := connection.recv(1 << 16):
        for body in unpacker.feed(data):
            return decode_requests(body)[0]
    return None
