"""In-flight requests: sends them, waits, checks the replies, aborts, and resends after an interruption."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rollgym.core.errors import AgentError, EngineLost
from rollgym.core.routed_experts import RoutedExperts
from rollgym.engines.base import FinishReason, GenerateRequest, Generation
from rollgym.engines.servers.client import Unreached
from rollgym.engines.servers.reply import TOKEN_BYTES, Piece, Spans
from rollgym.engines.servers.routed_experts import token_bytes
from rollgym.engines.servers.server_group import ServerGroup

_ABORT_SECONDS = 0.2
"""Seconds before an abort is repeated: a server ignores an abort that arrives before its request."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A reply in progress: its tokens so far and its HTTP call. Interrupted replies need several calls."""

    request: GenerateRequest
    max_tokens: int
    """Maximum number of tokens of the reply."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: Spans = field(default_factory=list)
    experts: RoutedExperts | None = None
    """As the last call reports them: it has computed the tokens of the earlier ones again."""
    rid: str = ""
    task: asyncio.Task[bytes] | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=time.perf_counter)
    queue_seconds: float = 0.0

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and sampled ids."""
        return (*self.request.prompt_ids, *self.token_ids)

    @property
    def room(self) -> int:
        """Number of tokens it may still get."""
        return self.max_tokens - len(self.token_ids)

    def new_rid(self) -> str:
        """Create the id of the next HTTP call. All have the same length: servers abort by id prefix."""
        self.rid = uuid.uuid4().hex
        return self.rid

    def add(self, piece: Piece) -> FinishReason | None:
        """Append the result of a call; returns the finish reason if the reply is complete."""
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.experts = piece.routed_experts
        for version, count in piece.spans:
            if self.spans and self.spans[-1][0] == version:
                count += self.spans.pop()[1]
            self.spans.append((version, count))
        if piece.token_ids and piece.token_ids[-1] in self.request.sampling.stop_ids:
            return "stop"
        if not self.room or piece.kind == "length":
            return "length"
        # Aborted, or an end-of-sequence token of the model that is not in stop_ids.
        return None

    def result(self, reason: FinishReason) -> Generation:
        """Return the reply."""
        return Generation(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            version_spans=tuple(self.spans),
            queue_seconds=self.queue_seconds,
            generate_seconds=time.perf_counter() - self.started - self.queue_seconds,
            routed_experts=self.experts,
        )


class RequestTracker:
    """All in-flight requests of one server group."""

    def __init__(self, servers: ServerGroup, vocabulary: int, version: int) -> None:
        self.servers = servers
        self.vocabulary = vocabulary
        self.history = [version]
        """All weight versions so far."""
        self.gate = asyncio.Event()
        """Cleared while generation is paused."""
        self.gate.set()
        self.failure: AgentError | None = None
        """Set when the engine has failed for good or is closed."""
        self.pending: set[PendingRequest] = set()
        self.on_lost: Callable[[], Awaitable[None]] | None = None
        """Called when a server has died; None if it cannot be restarted."""
        self.answered = 0
        """Number of successful calls so far."""
        self.prefix_hit_tokens = 0
        """Prompt tokens that the servers found in their prefix caches."""
        self.computed_tokens = 0
        """Prompt tokens they did not find there, and sampled tokens."""
        self._in_flight: set[asyncio.Task[bytes]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._interruptions = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply, in as many calls as it takes."""
        call = PendingRequest(request, self.servers.check(request, self.vocabulary))
        self.pending.add(call)
        try:
            while True:
                await self._enter(call)
                if call.aborted.is_set():
                    return call.result("aborted")
                interruptions = self._interruptions
                piece = await self._call(call)
                if piece is None:
                    continue
                reason = call.add(piece)
                if reason is not None:
                    return call.result(reason)
                if call.aborted.is_set():
                    return call.result("aborted")
                if piece.kind == "abort" and interruptions == self._interruptions:
                    raise AgentError(f"{self.servers.front.url} aborted a reply without being asked to.")
        finally:
            self.pending.discard(call)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort these replies."""
        wanted = frozenset(request_ids)
        calls = [call for call in self.pending if call.request.request_id in wanted]
        for call in calls:
            call.aborted.set()
        await asyncio.gather(*(self._abort(call) for call in calls))

    async def interrupt(self) -> None:
        """Abort all calls; their replies are resent from their current tokens."""
        self._interruptions += 1
        while self._in_flight:
            await self.servers.abort()
            if self._in_flight:  # they may all have ended in the meantime
                await asyncio.wait(self._in_flight, timeout=_ABORT_SECONDS)

    def cancel_all(self) -> None:
        """Cancel all calls to a dead server."""
        for task in self._in_flight:
            task.cancel()

    def fail(self, failure: AgentError) -> None:
        """Fail all pending and future requests."""
        self.failure = failure
        self.gate.set()
        self.cancel_all()

    async def close(self) -> None:
        """Fail all requests and cancel background tasks."""
        self.fail(AgentError("The engine was closed."))
        for task in self._background:
            task.cancel()
        while self._in_flight or self._background:
            await asyncio.wait([*self._in_flight, *self._background])
            await asyncio.sleep(0)

    def in_background(self, chore: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        """Run a coroutine in a background task; errors of the engine are ignored."""

        async def quietly() -> None:
            with suppress(AgentError):
                await chore

        task = asyncio.create_task(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _enter(self, call: PendingRequest) -> None:
        """Wait until generation is not paused, or the reply is aborted."""
        started = time.perf_counter()
        while not self.gate.is_set() and not call.aborted.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, call.aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        call.queue_seconds += time.perf_counter() - started
        if self.failure is not None:
            raise self.failure
        if not call.aborted.is_set():
            for worker in self.servers.workers:
                worker.state.may_generate()

    async def _call(self, call: PendingRequest) -> Piece | None:
        """Request the rest of a reply; returns None if the server died before it received the call."""
        rid, max_tokens, sampling = call.new_rid(), call.room, call.request.sampling
        body = self.servers.request_body(rid, call.ids, sampling, max_tokens, len(call.token_ids))
        first = len(self.history) - 1
        try:
            experts = token_bytes(self.servers.experts) * (len(call.ids) + max_tokens)
            answer = await self._answer(call, body, (1 << 20) + TOKEN_BYTES * max_tokens + experts)
        except Unreached:
            if self.on_lost is None:
                raise
            await self.on_lost()
            return None
        except EngineLost:
            if self.on_lost is not None:
                self.in_background(_await(self.on_lost))
            raise
        known, where = self.history[first:], self.servers.front.url

        def number(name: str) -> int:
            """Return the version for the name reported by a server; it must be one that was sent."""
            if name.isascii() and name.isdigit() and len(name) < 20 and int(name) in known:
                return int(name)
            raise EngineLost(
                f"{where} generated with weight version {name[:40]!r} instead of {known[-1]}: "
                "it was restarted or updated by another client."
            )

        prompt = len(call.ids)
        piece = self.servers.read(answer, rid, prompt, sampling, max_tokens, self.vocabulary, number)
        self.answered += 1
        self.prefix_hit_tokens += piece.cached_tokens
        self.computed_tokens += prompt - piece.cached_tokens + len(piece.token_ids)
        return piece

    async def _answer(self, call: PendingRequest, body: dict[str, Any], limit: int) -> bytes:
        task = call.task = asyncio.create_task(self.servers.generate(body, limit, call.request.session))
        self._in_flight.add(task)
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise self.failure or EngineLost(f"{self.servers.front.url} died during a reply.") from None
            call.aborted.set()
            self.in_background(self._abort(call))
            raise

    def _done(self, task: asyncio.Task[bytes]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller may have been cancelled
        self.flush_if_idle()

    def flush_if_idle(self) -> None:
        """Flush caches filled by older weights if nothing is running."""
        if (
            not self._in_flight
            and self.gate.is_set()
            and any(one.state.stale for one in self.servers.workers)
        ):
            self.in_background(self.servers.flush_stale())

    async def _abort(self, call: PendingRequest) -> None:
        """Send aborts until the call has ended."""
        while call.task is not None and not call.task.done():
            with suppress(AgentError):
                await self.servers.abort(call.rid)
            await asyncio.wait([call.task], timeout=_ABORT_SECONDS)


async def _await(work: Callable[[], Awaitable[None]]) -> None:
    await work()
