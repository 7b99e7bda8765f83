"""RPC to one Ray actor: batches small calls into few messages, and detects the actor's death.

A Ray call costs about a millisecond of the driver's time. Here, all requests made while a message is being
sent go with the next one, and responses come back likewise, each as soon as it is ready: one round trip per
request, but not one Ray call. An `ActorClient` always has one poll for responses open; if the poll fails, the
actor is lost, and so are all pending requests.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from rollgym.cluster.errors import ActorLost, need_ray, why_lost
from rollgym.cluster.heartbeat import hung, until_hung
from rollgym.core.errors import (
    AgentError,
    ContextFull,
    EngineLost,
    EnvError,
    RollgymError,
    RunError,
    UsageError,
    WorkerLost,
)
from rollgym.core.failures import failure_of
from rollgym.core.types import Failure
from rollgym.engines.base import BadRequest
from rollgym.pool.errors import LeaseLost


class Request(NamedTuple):
    """A request to an actor."""

    id: int
    body: Any
    """What `ActorServer.serve` receives; None cancels the request with this id."""


class Response(NamedTuple):
    """The response to a request."""

    id: int
    ok: bool
    body: Any
    """The result, or the error as returned by `error_to_dict`."""


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


class ActorServer:
    """Server side of the RPC, in the actor: calls `serve` for each request, concurrently."""

    def __init__(self) -> None:
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._responses: list[Response] = []
        self._ready = asyncio.Event()

    async def serve(self, body: Any) -> Any:
        """Handle the body of a request and return the result."""
        raise NotImplementedError

    async def receive(self, requests: list[Request]) -> None:
        """Start or cancel requests."""
        for id_, body in requests:
            if body is not None:
                self._tasks[id_] = asyncio.create_task(self._handle(id_, body))
            elif (task := self._tasks.get(id_)) is not None:
                task.cancel()

    async def poll(self) -> list[Response]:
        """Return all responses that are ready, as soon as there is one.

        The poll of a client that was replaced ends without any: they are for its successor.
        """
        ready = self._ready
        await ready.wait()
        if ready is not self._ready:
            return []
        ready.clear()
        responses, self._responses = self._responses, []
        return responses

    async def replace_client(self) -> None:
        """Get ready for another client: cancel the requests of the former one and drop its responses."""
        former, self._ready = self._ready, asyncio.Event()
        tasks, self._tasks = list(self._tasks.values()), {}
        self._responses = []
        former.set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _handle(self, id_: int, body: Any) -> None:
        ready = self._ready
        try:
            response = Response(id_, True, await self.serve(body))
        except asyncio.CancelledError:
            error = RunError("The request was cancelled in the actor.")
            response = Response(id_, False, error_to_dict(error))
        except Exception as error:
            response = Response(id_, False, error_to_dict(error))
        if ready is not self._ready:  # the next client may use the same id
            return
        del self._tasks[id_]
        self._responses.append(response)
        self._ready.set()


class ActorClient:
    """Client side of the RPC, in the driver; bound to one event loop.

    Args:
        actor: Handle of an `ActorServer` actor.
        lost_error: Creates the error of pending requests from the reason why the actor is lost.
        on_loss: Called once with the reason when the actor is lost.
        heartbeat_timeout: Seconds without a heartbeat after which the actor is killed and counts as lost;
            None disables heartbeats. The actor must have been created with `heartbeat.OPTIONS`.
    """

    def __init__(
        self,
        actor: Any,
        lost_error: Callable[[str], RollgymError],
        on_loss: Callable[[str], None] = lambda reason: None,
        heartbeat_timeout: float | None = None,
    ) -> None:
        self.actor = actor
        self.closed_reason: str | None = None
        """Why no more requests can be sent; None while they can."""
        self._lost_error = lost_error
        self._on_loss = on_loss
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[Request] = []
        self._flushing = False
        self._loop = asyncio.get_running_loop()
        self._poller = self._loop.create_task(self._poll())
        self._watchdog: asyncio.Task[None] | None = None
        if heartbeat_timeout is not None:
            self._watchdog = self._loop.create_task(self._watch(heartbeat_timeout))

    async def call(self, body: Any) -> Any:
        """Send a request and return its result. Cancelling the call cancels it in the actor too."""
        if self.closed_reason is not None:
            raise self._lost_error(self.closed_reason)
        id_ = next(self._ids)
        future = self._pending[id_] = self._loop.create_future()
        self._post(Request(id_, body))
        try:
            return await future
        except asyncio.CancelledError:
            if self._pending.pop(id_, None) is not None and self.closed_reason is None:
                self._post(Request(id_, None))
            raise

    def send(self, body: Any) -> None:
        """Send a request without waiting for its result."""
        if self.closed_reason is None:
            self._post(Request(next(self._ids), body))

    def close(self, reason: str = "the client was closed") -> None:
        """Send no more requests, and fail the pending ones."""
        self._poller.cancel()
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._fail_pending(reason)

    def _post(self, request: Request) -> None:
        self._outbox.append(request)
        if not self._flushing:
            # Requests made in the same iteration of the event loop share a message.
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        requests, self._outbox = self._outbox, []
        if requests and self.closed_reason is None:
            self.actor.receive.remote(requests)

    async def _poll(self) -> None:
        try:
            while True:
                for response in await self.actor.poll.remote():
                    self._settle(response)
        except Exception as error:  # of Ray or any other: pending requests must not wait forever
            if self._watchdog is not None:
                self._watchdog.cancel()
            reason = why_lost(error)
            self._fail_pending(reason)
            self._on_loss(reason)

    async def _watch(self, timeout: float) -> None:
        ray = need_ray()
        try:
            await until_hung(self.actor, timeout)
        except ray.exceptions.RayError:
            return  # the actor died, which the poller notices as well
        self._poller.cancel()
        ray.kill(self.actor)
        self._fail_pending(hung(timeout))
        self._on_loss(hung(timeout))

    def _settle(self, response: Response) -> None:
        future = self._pending.pop(response.id, None)
        if future is None or future.done():
            return
        if response.ok:
            future.set_result(response.body)
        else:
            future.set_exception(error_from_dict(response.body))

    def _fail_pending(self, reason: str) -> None:
        if self.closed_reason is not None:
            return
        self.closed_reason = reason
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(self._lost_error(reason))
                future.exception()  # marks it as retrieved: its caller may have been cancelled


def error_to_dict(error: Exception) -> dict[str, Any]:
    """Convert an exception into plain data."""
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS), "RunError")
    failure = failure_of(error)
    data: dict[str, Any] = {
        "kind": kind,
        "message": str(error) if isinstance(error, RollgymError) else f"{type(error).__name__}: {error}",
        "failure": (failure.type, failure.message, failure.traceback or traceback.format_exc()),
    }
    if isinstance(error, LeaseLost):
        data["lease"] = {"reason": error.reason, "guilty": error.guilty, "culprits": error.culprits}
    return data


def error_from_dict(data: dict[str, Any]) -> RollgymError:
    """Recreate an exception from `error_to_dict`."""
    name, message, trace = data["failure"]
    error: RollgymError
    if "lease" in data:
        error = LeaseLost(data["message"], output=trace, **data["lease"])
    else:
        error = _KINDS[data["kind"]](data["message"])
    error.failure = Failure(type=name, message=message, traceback=trace)
    return error
