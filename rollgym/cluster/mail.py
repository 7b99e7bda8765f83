"""Many small calls to one actor, in few messages, and one place that notices when it dies.

A call of Ray's own costs about a millisecond of the driver's time. Here whatever is asked while a message is
under way goes with the next one, and answers come back likewise, each when it is ready: one round trip for
each call, but not one Ray call. A `Line` always has one request for answers open; if that fails the actor is
gone, and so is everything that waits.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Callable
from typing import Any

from rollgym.cluster.errors import ActorLost, need_ray, why_lost
from rollgym.cluster.heartbeat import hung, until_hung
from rollgym.engines import BadRequest
from rollgym.errors import (
    AgentError,
    ContextFull,
    EngineLost,
    EnvError,
    RollgymError,
    RunError,
    UsageError,
    WorkerLost,
)
from rollgym.failures import failure_of
from rollgym.pool.lost import LeaseLost
from rollgym.types import Failure

Letter = tuple[int, Any]
"""A number and what is asked; ``None``: stop working on that number."""
Answer = tuple[int, bool, Any]
"""The number, whether it went well, and what came of it (or a `Trouble` as a dict)."""

_KINDS: dict[str, type[RollgymError]] = {
    kind.__name__: kind
    for kind in (
        ActorLost,
        AgentError,
        BadRequest,
        ContextFull,
        EngineLost,
        EnvError,
        RunError,
        UsageError,
        WorkerLost,
    )
}


class Mailbox:
    """The actor's side: `serve` is called for each letter, all at the same time."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: list[Answer] = []
        self._some = asyncio.Event()

    async def serve(self, body: Any) -> Any:
        """Do what a letter asks."""
        raise NotImplementedError

    async def hear(self, letters: list[Letter]) -> None:
        """Letters came."""
        for number, body in letters:
            if body is not None:
                self._tasks[number] = asyncio.create_task(self._work(number, body))
            elif (task := self._tasks.get(number)) is not None:
                task.cancel()

    async def answers(self) -> list[Answer]:
        """All answers that are ready, as soon as there is one."""
        await self._some.wait()
        self._some.clear()
        ready, self._answers = self._answers, []
        return ready

    async def _work(self, number: int, body: Any) -> None:
        answer: Answer
        try:
            answer = (number, True, await self.serve(body))
        except asyncio.CancelledError:
            answer = (number, False, trouble(RunError("The call was cancelled where it ran.")))
        except Exception as error:
            answer = (number, False, trouble(error))
        del self._tasks[number]
        self._answers.append(answer)
        self._some.set()


class Line:
    """The driver's side of a `Mailbox` actor; lives in one event loop.

    Args:
        actor: A handle to it.
        lost: Makes the error for those that wait when the actor is gone, out of Ray's reason.
        on_loss: Called once then.
        heartbeat_timeout: Seconds without a sign of life after which the actor is killed and counts as gone;
            ``None`` watches over none. The actor must have been made with `heartbeat.OPTIONS`.
    """

    def __init__(
        self,
        actor: Any,
        lost: Callable[[str], RollgymError],
        on_loss: Callable[[str], None] = lambda why: None,
        heartbeat_timeout: float | None = None,
    ) -> None:
        self.actor = actor
        self.gone: str | None = None
        """Why nothing can be asked any more."""
        self._lost = lost
        self._on_loss = on_loss
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[Letter] = []
        self._flushing = False
        self._loop = asyncio.get_running_loop()
        self._listener = self._loop.create_task(self._listen())
        self._watcher: asyncio.Task[None] | None = None
        if heartbeat_timeout is not None:
            self._watcher = self._loop.create_task(self._watch(heartbeat_timeout))

    async def ask(self, body: Any) -> Any:
        """Have the actor do something. A cancelled call is cancelled there too."""
        if self.gone is not None:
            raise self._lost(self.gone)
        number = next(self._numbers)
        future = self._waiting[number] = self._loop.create_future()
        self._post(number, body)
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None and self.gone is None:
                self._post(number, None)
            raise

    def tell(self, body: Any) -> None:
        """Have the actor do something, and do not wait for it."""
        if self.gone is None:
            self._post(next(self._numbers), body)

    def hang_up(self, why: str = "it was closed") -> None:
        """Ask nothing more; whoever still waits is told."""
        self._listener.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        self._end(why)

    def _post(self, number: int, body: Any) -> None:
        self._outbox.append((number, body))
        if not self._flushing:
            # Whatever else is asked in this turn of the event loop goes along.
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        letters, self._outbox = self._outbox, []
        if letters and self.gone is None:
            self.actor.hear.remote(letters)

    async def _listen(self) -> None:
        try:
            while True:
                for number, well, body in await self.actor.answers.remote():
                    self._settle(number, well, body)
        except Exception as error:  # of Ray's, or of whatever else: nobody may wait for ever
            if self._watcher is not None:
                self._watcher.cancel()
            why = why_lost(error)
            self._end(why)
            self._on_loss(why)

    async def _watch(self, timeout: float) -> None:
        ray = need_ray()
        try:
            await until_hung(self.actor, timeout)
        except ray.exceptions.RayError:
            return  # it died, which the listener hears as well
        self._listener.cancel()
        ray.kill(self.actor)
        self._end(hung(timeout))
        self._on_loss(hung(timeout))

    def _settle(self, number: int, well: bool, body: Any) -> None:
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return
        if well:
            future.set_result(body)
        else:
            future.set_exception(remade(body))

    def _end(self, why: str) -> None:
        if self.gone is not None:
            return
        self.gone = why
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(self._lost(why))
                future.exception()  # seen, even where its call was cancelled


def trouble(error: Exception) -> dict[str, Any]:
    """An exception as plain data."""
    kind = next((one.__name__ for one in type(error).__mro__ if one.__name__ in _KINDS), "RunError")
    failure = failure_of(error)
    found: dict[str, Any] = {
        "kind": kind,
        "message": str(error) if isinstance(error, RollgymError) else f"{type(error).__name__}: {error}",
        "failure": (failure.type, failure.message, failure.traceback or traceback.format_exc()),
    }
    if isinstance(error, LeaseLost):
        found["lease"] = {"reason": error.reason, "guilty": error.guilty, "culprits": error.culprits}
    return found


def remade(found: dict[str, Any]) -> RollgymError:
    """The exception again."""
    name, message, trace = found["failure"]
    error: RollgymError
    if "lease" in found:
        error = LeaseLost(found["message"], output=trace, **found["lease"])
    else:
        error = _KINDS[found["kind"]](found["message"])
    error.failure = Failure(type=name, message=message, traceback=trace)
    return error
