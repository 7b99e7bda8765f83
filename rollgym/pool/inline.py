"""Pool without worker processes: environments run in threads of this process, beside the event loop.

The loop's thread stays free, so that limits, Ctrl-C and SIGTERM take effect while an environment blocks. A
thread cannot be killed: one whose episode was abandoned ends with the process. A call that never releases
the interpreter lock (a loop in C) blocks everything; worker processes do not have this limitation.

Environments with ``pool_thread = "any"`` are called in the loop's thread as long as their calls are quick.
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

from rollgym.core.errors import EnvError, one_line
from rollgym.core.registry import import_module
from rollgym.core.types import EpisodeSpec
from rollgym.pool.base import EnvSession, Reset, Step
from rollgym.pool.hosted_env import HostedEnv, IdleEnvs, kind_of
from rollgym.pool.stats import PoolStats
from rollgym.pool.threads import InlineBudget, Thread, thread_for
from rollgym.utils.signals import in_blocking_call

T = TypeVar("T")
CLOSE_SECONDS = 2.0
"""Seconds for all environments together to close when the pool is closed."""
SLOW = 0.05
"""Seconds above which a call is too slow for the loop's thread, where it delays limits and signals. A
worker's service thread has a stricter bound."""
PATIENCE = 1.0
"""Seconds after which Python code of an abandoned episode is interrupted."""


class Call:
    """A call to an environment: made in a thread, awaited in the loop."""

    __slots__ = ("context", "error", "finished", "future", "result", "work")

    def __init__(self, future: asyncio.Future[Any], work: Callable[[], Any], context: Context) -> None:
        self.future = future
        self.work = work
        self.context = context
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished = False

    def make(self) -> None:
        """Make the call and store its result or error."""
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
        """In the loop: pass the result to the episode if it still waits."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class InlineThread:
    """A thread that makes the calls to one environment; started when it is first needed."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._now: Call | None = None
        self.left = False
        """Abandoned: the thread ends after its current call."""

    def call(self, work: Callable[[], Any], context: Context) -> Call:
        """Queue a call for the thread."""
        call = Call(asyncio.get_running_loop().create_future(), work, context)
        self._calls.put(call)
        if self._thread is None:
            # A daemon thread: the process does not wait for an environment that never returns.
            self._thread = threading.Thread(target=self._run, name="rollgym-env", daemon=True)
            self._thread.start()
        return call

    def end(self) -> None:
        """End the thread after its queued calls."""
        if self._thread is not None:
            self._calls.put(None)

    def leave(self) -> None:
        """Abandon the thread: it ends after its current call, which is interrupted after `PATIENCE`."""
        self.left = True
        self.end()
        asyncio.get_running_loop().call_later(PATIENCE, self.interrupt)

    def interrupt(self) -> None:
        """Raise `SystemExit` in the thread; takes effect at the next Python instruction."""
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
                return  # the loop is closed: nothing waits for the result


class InlineSlot:
    """Holds an environment (made on first use) and the thread that calls it."""

    __slots__ = ("_env_thread", "_running", "hosted", "inline_budget", "kind", "thread")

    def __init__(self, kind: bytes, thread: Thread) -> None:
        self.kind = kind
        self.thread = thread
        self.hosted: HostedEnv | None = None
        self.inline_budget = {"reset": InlineBudget(SLOW), "step": InlineBudget(SLOW)}
        self._env_thread: InlineThread | None = None
        self._running: Call | None = None

    async def call(self, name: str, work: Callable[[], T], context: Context) -> T:
        """Call the environment in the thread that its setting requires."""
        if self.thread == "main":
            return direct(work, context)
        if self.thread == "any" and self.inline_budget[name].allows_inline():
            made = self.hosted is not None  # making an environment is slow once and does not count
            began = time.perf_counter()
            try:
                return direct(work, context)
            finally:
                if made:
                    self.inline_budget[name].record(time.perf_counter() - began)
        if self._env_thread is None:
            self._env_thread = InlineThread()
        self._running = self._env_thread.call(work, context)
        result: T = await self._running.future
        return result

    @property
    def left(self) -> InlineThread | None:
        """The thread that was abandoned with a running call."""
        return self._env_thread if self._env_thread is not None and self._env_thread.left else None

    def close(self) -> asyncio.Future[None] | None:
        """Close the environment in its thread. One whose call still runs is abandoned."""
        hosted, env_thread = self.hosted, self._env_thread
        if env_thread is None:
            if hosted is not None:
                hosted.close()
            return None
        if self._running is not None and not self._running.finished:
            env_thread.leave()
            return None
        closing = None if hosted is None else env_thread.call(hosted.close, copy_context()).future
        env_thread.end()
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

    The class attribute ``pool_thread`` selects the thread: a separate one (``own``), the loop's while calls
    are quick (``any``), or always the loop's (``main``), which blocks limits while the environment works.
    """

    def __init__(self, modules: Iterable[str] = ()) -> None:
        for module in modules:
            import_module(module)
        self._idle_envs: IdleEnvs[InlineSlot] = IdleEnvs()
        self._leased: dict[int, InlineSlot] = {}
        self._threads: dict[bytes, Thread] = {}
        self._left: list[InlineSlot] = []
        """Slots whose call was still running when their episode ended."""
        self._opened = 0

    async def open(self, spec: EpisodeSpec) -> InlineSession:
        """Open a lease on an environment in this process; `InlineSession.reset` makes it."""
        env_slot = self._idle_envs.take(kind_of(spec)) or self._env_slot(spec)
        self._leased[id(env_slot)] = env_slot
        self._opened += 1
        return InlineSession(self, env_slot, spec)

    def _env_slot(self, spec: EpisodeSpec) -> InlineSlot:
        kind = kind_of(spec)
        if kind not in self._threads:
            self._threads[kind] = thread_for(spec)
        thread = self._threads[kind]
        if thread not in ("own", "any", "main"):
            raise EnvError(f"pool_thread is {thread!r}; it must be 'own', 'any' or 'main'")
        return InlineSlot(kind, thread)

    async def close(self) -> None:
        """Close every environment; abandon those that do not close in time."""
        env_slots = [*self._leased.values(), *self._idle_envs.clear()]
        self._leased.clear()
        closing = [future for future in (env_slot.close() for env_slot in env_slots) if future is not None]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_SECONDS)
        for env_slot in (*self._left, *env_slots):
            if env_slot.left is not None:
                env_slot.left.interrupt()

    def stats(self) -> PoolStats:
        """Leases in use and episodes so far."""
        return PoolStats(leases=len(self._leased), episodes=self._opened - len(self._leased))

    def release(self, env_slot: InlineSlot, healthy: bool) -> asyncio.Future[None] | None:
        """Return an environment: reused if healthy, otherwise closed."""
        if self._leased.pop(id(env_slot), None) is None:
            return None  # the pool was closed meanwhile
        unwanted = self._idle_envs.put(env_slot) if healthy else env_slot
        closing = None if unwanted is None else unwanted.close()
        if env_slot.left is not None:
            self._left.append(env_slot)
        return closing


class InlineSession(EnvSession):
    """One lease of an `InlinePool`."""

    def __init__(self, pool: InlinePool, env_slot: InlineSlot, spec: EpisodeSpec) -> None:
        self._pool = pool
        self._env_slot = env_slot
        self._spec = spec
        self._context = copy_context()
        self.healthy = True
        """False during a call and after a failed one: the environment is then not reused."""
        self._open = True

    async def reset(self) -> Reset:
        """Start the episode."""
        self.healthy = False
        result = await self._env_slot.call("reset", self._begin, self._context)
        self.healthy = True
        return result

    async def step(self, action: str) -> Step:
        """Play one action."""
        hosted = self._env_slot.hosted
        assert hosted is not None, "reset() comes first"
        self.healthy = False
        result = await self._env_slot.call("step", lambda: hosted.step(action), self._context)
        self.healthy = True
        return result

    async def close(self) -> None:
        """Return the environment to the pool."""
        if self._open:
            self._open = False
            closing = self._pool.release(self._env_slot, self.healthy)
            if closing is not None:
                await asyncio.wait([closing])

    def _begin(self) -> Reset:
        if self._env_slot.hosted is None:
            self._env_slot.hosted = HostedEnv(self._spec)
        return self._env_slot.hosted.begin(self._spec)
