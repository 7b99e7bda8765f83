"""Threads of a worker: each environment has one thread, so that a slow one does not delay the others."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal, NoReturn

from rollgym.core.errors import RollgymError
from rollgym.core.registry import find_spec, load_object
from rollgym.core.types import EpisodeSpec
from rollgym.pool.hosted_env import HostedEnv
from rollgym.pool.protocol import Act, Begin
from rollgym.pool.status_page import SLOTS, StatusPage

Thread = Literal["own", "any", "main"]
"""Thread that calls an environment: its own (always the same one), any, or the main thread.

Set by the class attribute ``pool_thread``; default ``own``. ``any`` is for thread-agnostic environments
whose calls take far less than a millisecond: they are called without a thread switch. ``main`` is for
environments that set signal handlers; their calls are serialized.
"""

SLOW = 0.002
"""Seconds above which a call is too slow for the service thread."""


def thread_for(spec: EpisodeSpec) -> Thread:
    """Return the thread setting of the environment's class without making an environment."""
    try:
        maker: Any = find_spec(spec.env_id).entry_point
        if isinstance(maker, str):
            maker = load_object(maker, "environment")
    except RollgymError:
        return "own"  # making it fails too, with the reason
    setting: Thread = getattr(maker, "pool_thread", "own")
    return setting


def die() -> NoReturn:
    """End a broken worker: an exit is detected, a hang is not."""
    try:
        traceback.print_exc()
    finally:
        os._exit(70)


class EnvThread:
    """Job queue of one thread. ``slot`` is its index on the worker's status page."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.ident = 0
        self.call: tuple[EnvSlot, Begin | Act | None] | None = None
        """Last call made here; the status page tells whether it still runs. Closing has no request."""
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.post = self._jobs.put
        """Add a job; ``None`` ends the thread."""

    def run(self) -> None:
        """Run jobs in the calling thread until it is ended."""
        self.ident = threading.get_ident()
        get = self._jobs.get
        try:
            while (job := get()) is not None:
                job()
        except BaseException:
            die()  # environments' errors are answers, so this is an internal error


class EnvThreads:
    """Threads of a worker: the service thread, the main thread, and others as needed."""

    def __init__(self, status: StatusPage) -> None:
        self.service = EnvThread(0)
        self.main = EnvThread(1)
        self._status = status
        status.use(1)
        self._free = list(range(SLOTS - 2, 1, -1))
        self._running: dict[EnvThread, threading.Thread] = {}

    def new(self) -> EnvThread:
        """Start a new thread."""
        # Beyond 4,000 threads the last slot is shared, and failures are attributed less exactly.
        env_thread = EnvThread(self._free.pop() if self._free else SLOTS - 1)
        self._status.use(env_thread.slot)
        # Daemon threads: a worker that stops does not wait for calls that hang.
        thread = threading.Thread(target=env_thread.run, name=f"env {env_thread.slot}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the thread limit of the system is reached
            return self.main
        self._running[env_thread] = thread
        return env_thread

    def end(self, env_thread: EnvThread) -> None:
        """End a thread after its current job."""
        if self._running.pop(env_thread, None) is not None:
            env_thread.post(None)
            if env_thread.slot != SLOTS - 1:
                self._free.append(env_thread.slot)

    def end_all(self) -> None:
        """End every thread, the main one last, after all others."""
        running = list(self._running.items())
        for env_thread, _ in running:
            env_thread.post(None)
        for _, thread in running:
            thread.join()
        self.main.post(None)

    def all(self) -> list[EnvThread]:
        """Return all threads."""
        return [self.service, self.main, *list(self._running)]


class InlineBudget:
    """Decides whether calls of one kind may run in the service thread, where they block all others.

    A slow call suspends inline calls for a number of calls. Each further slow call doubles the suspension,
    and quick calls shorten it again, so that a single outlier has no lasting effect.
    """

    __slots__ = ("_next", "_slow", "_wait")

    def __init__(self, slow: float = SLOW) -> None:
        self._slow = slow
        self._wait = 0
        self._next = 8

    def allows_inline(self) -> bool:
        """Whether the next call may run inline. Ask once per call."""
        if self._wait:
            self._wait -= 1
            return False
        return True

    def record(self, seconds: float) -> None:
        """Record the duration of an inline call."""
        if seconds > self._slow:
            self._wait = self._next
            self._next = min(2 * self._next, 4096)
        elif self._next > 8:
            self._next -= 1


class EnvSlot:
    """Holds an environment (made on first use) and the thread that calls it."""

    __slots__ = ("busy", "env_thread", "episode", "hosted", "inline_budget", "kind", "thread")

    def __init__(self, kind: bytes, thread: Thread | None) -> None:
        self.kind = kind
        self.episode = ""
        self.thread = thread
        """``None`` until the class of the environment has been inspected."""
        self.env_thread: EnvThread | None = None
        self.hosted: HostedEnv | None = None
        self.busy = False
        """A call is queued or running in the thread; later calls queue behind it."""
        self.inline_budget: dict[type[Begin | Act], InlineBudget] = {
            Begin: InlineBudget(),
            Act: InlineBudget(),
        }
