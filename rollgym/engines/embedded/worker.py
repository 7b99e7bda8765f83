"""The thread in which the model lives: made, run and changed there, and nowhere else.

The event loop stays free. What it wants done is a function, called between two passes; what comes back is an
`asyncio` future. The thread sleeps when there is nothing to compute.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rollgym.engines.embedded.batcher import Batcher
from rollgym.errors import AgentError, one_line

__all__ = ["Worker", "settle"]

T = TypeVar("T")
Command = Callable[[Batcher], None]


def settle(future: asyncio.Future[T]) -> Callable[[T | BaseException], None]:
    """A function that any thread may call with a future's result or error. One nobody awaits is lost."""
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


class Worker:
    """A thread that makes a batcher and keeps calling its `step`."""

    def __init__(self, make: Callable[[], Batcher]) -> None:
        self._make = make
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._ready: deque[Batcher | BaseException] = deque()
        self._paused = False
        self._closed = False
        self._thread = threading.Thread(target=self._live, name="rollgym-engine", daemon=True)

    def start(self) -> Batcher:
        """Make the batcher; raise what its making raised."""
        with self._wake:
            self._thread.start()
            self._wake.wait_for(lambda: self._ready)
        made = self._ready.popleft()
        if isinstance(made, BaseException):
            raise made
        return made

    def post(self, command: Command) -> None:
        """Have something done between two passes."""
        with self._wake:
            if self._closed:
                raise AgentError("The engine is closed.")
            self._commands.append(command)
            self._wake.notify()

    async def ask(self, command: Callable[[Batcher], T]) -> T:
        """Have something done between two passes, and wait for it."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        answer = settle(future)

        def run(batcher: Batcher) -> None:
            try:
                answer(command(batcher))
            except Exception as error:
                answer(error)

        self.post(run)
        return await future

    async def pause(self, paused: bool) -> None:
        """Stop computing, or go on."""

        def set_paused(_: Batcher) -> None:
            self._paused = paused

        await self.ask(set_paused)

    async def close(self) -> None:
        """End the thread; whatever is under way fails. Closing twice is closing once."""

        def end(batcher: Batcher) -> None:
            with self._wake:
                self._closed = True
            batcher.fail(AgentError("The engine was closed."), (*batcher.running, *batcher.waiting))

        if not self._closed:
            await self.ask(end)

    def _live(self) -> None:
        made: Any
        try:
            made = self._make()
        except BaseException as error:
            made = error
        with self._wake:
            self._ready.append(made)
            self._wake.notify_all()
        if isinstance(made, Batcher):
            with torch.inference_mode():
                while not self._closed:
                    self._turn(made)

    def _turn(self, batcher: Batcher) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._commands or not (self._paused or batcher.idle))
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command(batcher)
        if self._paused or self._closed or batcher.idle:
            return
        try:
            batcher.step()
        except Exception as error:  # nobody may wait for ever because of a defect here
            failure = AgentError(f"The engine failed: {one_line(error)}")
            batcher.fail(failure, (*batcher.running, *batcher.waiting))
