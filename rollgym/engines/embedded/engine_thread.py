"""The thread of the model: creates it, runs it and updates it.

The event loop posts functions that the thread calls between two passes, and gets their results as `asyncio`
futures. The thread sleeps while there is nothing to compute.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rollgym.core.errors import AgentError, one_line
from rollgym.engines.embedded.scheduler import BatchScheduler

__all__ = ["EngineThread", "in_loop", "settle"]

T = TypeVar("T")
Command = Callable[[BatchScheduler], None]


def settle(future: asyncio.Future[T]) -> Callable[[T | BaseException], None]:
    """Return a thread-safe function that sets a future's result or error."""
    loop = future.get_loop()

    def set_it(result: T | BaseException) -> None:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    def later(result: T | BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_it, result)

    return later


def in_loop(call: Callable[[T], None]) -> Callable[[T], None]:
    """Return a thread-safe function that calls ``call`` in the running event loop, in order."""
    loop = asyncio.get_running_loop()

    def later(value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(call, value)

    return later


class EngineThread:
    """A thread that creates a scheduler and calls its `step` in a loop."""

    def __init__(self, make: Callable[[], BatchScheduler]) -> None:
        self._make = make
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._ready: deque[BatchScheduler | BaseException] = deque()
        self._paused = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rollgym-engine", daemon=True)

    def start(self) -> BatchScheduler:
        """Create the scheduler; raises what its constructor raised."""
        with self._wake:
            self._thread.start()
            self._wake.wait_for(lambda: self._ready)
        made = self._ready.popleft()
        if isinstance(made, BaseException):
            raise made
        return made

    def post(self, command: Command) -> None:
        """Call ``command`` between two passes, without waiting for it."""
        with self._wake:
            if self._closed:
                raise AgentError("The engine is closed.")
            self._commands.append(command)
            self._wake.notify()

    async def call(self, command: Callable[[BatchScheduler], T]) -> T:
        """Call ``command`` between two passes and return its result."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        answer = settle(future)

        def run(scheduler: BatchScheduler) -> None:
            try:
                answer(command(scheduler))
            except Exception as error:
                answer(error)

        self.post(run)
        return await future

    async def pause(self, paused: bool) -> None:
        """Stop computing, or continue."""

        def set_paused(_: BatchScheduler) -> None:
            self._paused = paused

        await self.call(set_paused)

    async def close(self) -> None:
        """End the thread and fail all pending requests. Idempotent."""

        def end(scheduler: BatchScheduler) -> None:
            with self._wake:
                self._closed = True
            scheduler.fail(AgentError("The engine was closed."), (*scheduler.running, *scheduler.waiting))

        if not self._closed:
            await self.call(end)

    def _run(self) -> None:
        made: Any
        try:
            made = self._make()
        except BaseException as error:
            made = error
        with self._wake:
            self._ready.append(made)
            self._wake.notify_all()
        if isinstance(made, BatchScheduler):
            with torch.inference_mode():
                while not self._closed:
                    self._iterate(made)

    def _iterate(self, scheduler: BatchScheduler) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._commands or not (self._paused or scheduler.idle))
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command(scheduler)
        if self._paused or self._closed or scheduler.idle:
            return
        try:
            scheduler.step()
        except Exception as error:  # a defect here must not leave requests waiting forever
            failure = AgentError(f"The engine failed: {one_line(error)}")
            scheduler.fail(failure, (*scheduler.running, *scheduler.waiting))
