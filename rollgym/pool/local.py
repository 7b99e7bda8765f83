"""The pool of worker processes on this machine.

Each worker hosts many environments and answers one request at a time. A worker that dies, or does not answer
in time and is killed, takes its leases with it: their episodes end as ``worker_lost``, and the next lease
starts a new worker.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from rollgym.errors import EnvError, UsageError, WorkerLost
from rollgym.pool import Reset, Step
from rollgym.pool.wire import Answer, Hello, Request, Unpacker, pack
from rollgym.types import EpisodeSpec

T = TypeVar("T")

_answers = msgspec.msgpack.Decoder(Answer)


class LocalPool:
    """Environments in ``workers`` processes of this machine."""

    def __init__(
        self, workers: int = 2, *, modules: Iterable[str] = (), answer_seconds: float = 300.0
    ) -> None:
        if workers < 1:
            raise UsageError(f"A pool needs at least 1 worker, not {workers}.")
        self._modules = list(modules)
        self._answer_seconds = answer_seconds
        self._workers: list[Worker | None] = [None] * workers
        self._leases = itertools.count()
        self._starting = asyncio.Lock()

    async def open(self, spec: EpisodeSpec) -> LocalSession:
        """A lease in the worker that has the fewest."""
        worker = await self._least_busy()
        lease = next(self._leases)
        worker.leases += 1
        try:
            await worker.call(Request(0, "open", lease, spec=spec), type(None))
        except BaseException:
            worker.send_release(lease, healthy=False)
            raise
        return LocalSession(worker, lease)

    async def close(self) -> None:
        """Stop every worker and wait until each is gone."""
        workers = [worker for worker in self._workers if worker is not None]
        self._workers = [None] * len(self._workers)
        await asyncio.gather(*(worker.stop() for worker in workers))

    async def _least_busy(self) -> Worker:
        async with self._starting:
            for place, worker in enumerate(self._workers):
                if worker is not None and worker.lost is not None:
                    self._workers[place] = None
                    await worker.stop()
            alive = [worker for worker in self._workers if worker is not None]
            best = min(alive, key=lambda worker: worker.leases, default=None)
            # A new process only where every running one has something to do.
            if best is None or (best.leases and None in self._workers):
                best = await Worker.start(self._modules, self._answer_seconds)
                self._workers[self._workers.index(None)] = best
            return best


class Worker(asyncio.Protocol):
    """The pool's end of one worker process."""

    def __init__(self, process: subprocess.Popen[bytes], answer_seconds: float) -> None:
        self.leases = 0
        self.lost: str | None = None
        self._process = process
        self._answer_seconds = answer_seconds
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count(1)
        self._unpacker = Unpacker()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def start(cls, modules: list[str], answer_seconds: float) -> Worker:
        """Start a process and wait until it can host environments."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollgym.pool.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        worker = cls(process, answer_seconds)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker, sock=ours)
        try:
            await worker._exchange(0, pack(Hello(list(sys.path), modules)))
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def call(self, request: Request, kind: type[T]) -> T:
        """Send a request and wait for its answer; kill the worker when none comes in time."""
        request.number = next(self._numbers)
        answer = await self._exchange(request.number, pack(request))
        return msgspec.msgpack.decode(answer.result, type=kind)

    async def _exchange(self, number: int, message: bytes) -> Answer:
        if self.lost is not None or self._transport is None:
            raise WorkerLost(self.lost or "the worker is gone")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._transport.write(message)
        try:
            async with asyncio.timeout(self._answer_seconds):
                answer = await future
        except TimeoutError:
            self._lose(f"a worker did not answer within {self._answer_seconds:g} s and was killed")
            raise WorkerLost(self.lost or "") from None
        finally:
            self._waiting.pop(number, None)
        if answer.error is not None:
            error = EnvError(answer.error.message)
            error.failure = answer.error
            raise error
        return answer

    def send_release(self, lease: int, healthy: bool) -> None:
        """End a lease without waiting for the answer."""
        self.leases -= 1
        if self.lost is None and self._transport is not None:
            self._transport.write(pack(Request(next(self._numbers), "release", lease, healthy=healthy)))

    async def stop(self) -> None:
        """Close the connection, which ends the process; kill it when that is not enough."""
        if self._transport is not None:
            self._transport.close()
        try:
            await asyncio.to_thread(self._process.wait, 2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio once the socket is ready."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hand each answer to whoever waits for it; late answers to nobody."""
        for message in self._unpacker.feed(data):
            answer = _answers.decode(message)
            future = self._waiting.get(answer.number)
            if future is not None and not future.done():
                future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process is gone: so is everything that waited for it."""
        self._lose(f"a worker process died{self._exit_words()}")

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = reason
            self._process.kill()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerLost(reason))

    def _exit_words(self) -> str:
        try:
            code = self._process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            return ""
        return f" by signal {-code}" if code < 0 else f" with exit code {code}"


class LocalSession:
    """One lease in a worker process."""

    def __init__(self, worker: Worker, lease: int) -> None:
        self._worker = worker
        self._lease = lease
        self._healthy = True
        self._open = True

    async def reset(self) -> Reset:
        """Start the episode."""
        return await self._call(Request(0, "reset", self._lease), Reset)

    async def step(self, action: str) -> Step:
        """Play one action."""
        return await self._call(Request(0, "step", self._lease, action), Step)

    async def close(self) -> None:
        """Give the environment back."""
        if self._open:
            self._open = False
            self._worker.send_release(self._lease, self._healthy)

    async def _call(self, request: Request, kind: type[T]) -> T:
        # Unhealthy until the answer is there: also a cancelled call leaves the environment in the middle.
        self._healthy = False
        result = await self._worker.call(request, kind)
        self._healthy = True
        return result
