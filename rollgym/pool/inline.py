"""The pool without worker processes: environments live in this process, in threads beside the event loop.

The loop's own thread stays free, so that limits, Ctrl-C and SIGTERM are heard while an environment blocks. A
thread cannot be killed: one whose episode was given up is left to itself, and ends with the process. What
holds the interpreter lock for good (a loop in C) still stops everything: worker processes can be killed then.

Environments whose class promises quick calls (``pool_thread = "any"``) are called in the loop's thread as
long as they are quick.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

from rollgym.errors import EnvError, one_line
from rollgym.pool import Reset, Step
from rollgym.pool.host import Hosted, Shelf, kind_of
from rollgym.pool.lanes import Thread, Trust, thread_for
from rollgym.pool.stats import PoolStats
from rollgym.registry import import_module
from rollgym.signals import in_blocking_call
from rollgym.types import EpisodeSpec

T = TypeVar("T")
CLOSE_SECONDS = 2.0
"""How long the environments may take to close, all together, when the pool is closed."""
SLOW = 0.05
"""Seconds beyond which a call should not have been made in the loop's thread: limits and signals wait for
it. A worker's service thread answers many, and is stricter."""
PATIENCE = 1.0
"""Seconds after which code that an episode has given up is interrupted, where it is Python's."""


class Call:
    """One call to an environment: made in a thread, awaited in the loop."""

    __slots__ = ("context", "error", "finished", "future", "result", "work")

    def __init__(self, future: asyncio.Future[Any], work: Callable[[], Any], context: Context) -> None:
        self.future = future
        self.work = work
        self.context = context
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished = False

    def make(self) -> None:
        """Make the call; whatever it raises is its answer."""
        try:
            self.result = self.context.run(self.work)
        except Exception as error:
            self.error = error
        except BaseException as error:
            # SystemExit or KeyboardInterrupt of an environment ends its episode, not the thread or the loop.
            self.error = EnvError(f"the environment raised {one_line(error)}")
            self.error.__cause__ = error
        self.finished = True

    def answer(self) -> None:
        """In the loop: hand the answer to the episode that waits for it, if it still does."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Lane:
    """A thread that makes the calls to one environment; started when it is first needed."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._now: Call | None = None
        self.left = False
        """Given up: the thread ends after its current call."""

    def call(self, work: Callable[[], Any], context: Context) -> Call:
        """Have the thread make a call."""
        call = Call(asyncio.get_running_loop().create_future(), work, context)
        self._calls.put(call)
        if self._thread is None:
            # A daemon: the process does not wait for an environment that never answers.
            self._thread = threading.Thread(target=self._run, name="rollgym-env", daemon=True)
            self._thread.start()
        return call

    def end(self) -> None:
        """End the thread once it has made the calls that wait."""
        if self._thread is not None:
            self._calls.put(None)

    def leave(self) -> None:
        """Give the thread up: it ends when its call does, which is interrupted after a while."""
        self.left = True
        self.end()
        asyncio.get_running_loop().call_later(PATIENCE, self.interrupt)

    def interrupt(self) -> None:
        """Raise in the thread: that ends a loop in Python, and a sleep when it is over."""
        thread = self._thread
        if self._now is not None and thread is not None and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._now = call
            call.make()
            self._now = None
            try:
                call.future.get_loop().call_soon_threadsafe(call.answer)
            except RuntimeError:
                return  # the loop is closed: nothing waits for the answer any more


class Seat:
    """An environment, or the place for one, and the thread that calls it."""

    __slots__ = ("_lane", "_running", "hosted", "kind", "thread", "trust")

    def __init__(self, kind: bytes, thread: Thread) -> None:
        self.kind = kind
        self.thread = thread
        self.hosted: Hosted | None = None
        self.trust = {"reset": Trust(SLOW), "step": Trust(SLOW)}
        self._lane: Lane | None = None
        self._running: Call | None = None

    async def call(self, name: str, work: Callable[[], T], context: Context) -> T:
        """Make a call to the environment, in the thread that is due."""
        if self.thread == "main":
            return direct(work, context)
        if self.thread == "any" and self.trust[name].given():
            made = self.hosted is not None  # making one takes long once, and says nothing of the calls
            began = time.perf_counter()
            try:
                return direct(work, context)
            finally:
                if made:
                    self.trust[name].took(time.perf_counter() - began)
        if self._lane is None:
            self._lane = Lane()
        self._running = self._lane.call(work, context)
        result: T = await self._running.future
        return result

    @property
    def left(self) -> Lane | None:
        """The thread that was given up with a call under way."""
        return self._lane if self._lane is not None and self._lane.left else None

    def close(self) -> asyncio.Future[None] | None:
        """Close the environment where it was called. One whose call still runs is left to its thread."""
        hosted, lane = self.hosted, self._lane
        if lane is None:
            if hosted is not None:
                hosted.close()
            return None
        if self._running is not None and not self._running.finished:
            lane.leave()
            return None
        closing = None if hosted is None else lane.call(hosted.close, copy_context()).future
        lane.end()
        return closing


def direct(work: Callable[[], T], context: Context) -> T:
    """Make a call in the loop's thread, where Ctrl-C interrupts it."""
    with in_blocking_call():
        try:
            return context.run(work)
        except (KeyboardInterrupt, SystemExit) as error:
            raise EnvError(f"the environment raised {one_line(error)}") from error


class InlinePool:
    """Runs environments in threads of the calling process.

    Which thread calls an environment is what its class says by ``pool_thread``: one of its own (``own``), any
    (the loop's, as long as its calls are quick), or the loop's (``main``), which is then not free to hear
    limits while the environment works.
    """

    def __init__(self, modules: Iterable[str] = ()) -> None:
        for module in modules:
            import_module(module)
        self._shelf: Shelf[Seat] = Shelf()
        self._leased: dict[int, Seat] = {}
        self._threads: dict[bytes, Thread] = {}
        self._left: list[Seat] = []
        """Those whose call was still running when their episode ended."""
        self._opened = 0

    async def open(self, spec: EpisodeSpec) -> InlineSession:
        """A lease on an environment in this process; it is made by `InlineSession.reset`."""
        seat = self._shelf.take(kind_of(spec)) or self._seat(spec)
        self._leased[id(seat)] = seat
        self._opened += 1
        return InlineSession(self, seat, spec)

    def _seat(self, spec: EpisodeSpec) -> Seat:
        kind = kind_of(spec)
        if kind not in self._threads:
            self._threads[kind] = thread_for(spec)
        thread = self._threads[kind]
        if thread not in ("own", "any", "main"):
            raise EnvError(f"pool_thread is {thread!r}; it must be 'own', 'any' or 'main'")
        return Seat(kind, thread)

    async def close(self) -> None:
        """Close every environment; one that does not answer in time is left to its thread."""
        seats = [*self._leased.values(), *self._shelf.clear()]
        self._leased.clear()
        closing = [future for future in (seat.close() for seat in seats) if future is not None]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_SECONDS)
        for seat in (*self._left, *seats):
            if seat.left is not None:
                seat.left.interrupt()

    def stats(self) -> PoolStats:
        """Leases in use and episodes so far."""
        return PoolStats(leases=len(self._leased), episodes=self._opened - len(self._leased))

    def release(self, seat: Seat, healthy: bool) -> asyncio.Future[None] | None:
        """Take an environment back; one whose episode failed is thrown away, others are reused."""
        if self._leased.pop(id(seat), None) is None:
            return None  # the pool was closed meanwhile
        unwanted = self._shelf.put(seat) if healthy else seat
        closing = None if unwanted is None else unwanted.close()
        if seat.left is not None:
            self._left.append(seat)
        return closing


class InlineSession:
    """One lease of an `InlinePool`."""

    def __init__(self, pool: InlinePool, seat: Seat, spec: EpisodeSpec) -> None:
        self._pool = pool
        self._seat = seat
        self._spec = spec
        self._context = copy_context()
        self.healthy = True
        """False while a call is under way, and after one that failed: the environment is not used again."""
        self._open = True

    async def reset(self) -> Reset:
        """Start the episode."""
        self.healthy = False
        result = await self._seat.call("reset", self._begin, self._context)
        self.healthy = True
        return result

    async def step(self, action: str) -> Step:
        """Play one action."""
        hosted = self._seat.hosted
        assert hosted is not None, "reset() comes first"
        self.healthy = False
        result = await self._seat.call("step", lambda: hosted.step(action), self._context)
        self.healthy = True
        return result

    async def close(self) -> None:
        """Give the environment back."""
        if self._open:
            self._open = False
            closing = self._pool.release(self._seat, self.healthy)
            if closing is not None:
                await asyncio.wait([closing])

    def _begin(self) -> Reset:
        if self._seat.hosted is None:
            self._seat.hosted = Hosted(self._spec)
        return self._seat.hosted.begin(self._spec)
