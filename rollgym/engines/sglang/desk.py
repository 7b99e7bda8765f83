"""Where replies are asked for: sent, waited for, checked, aborted, asked for again after an interruption."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from rollgym.engines import GenerateRequest, Generation
from rollgym.engines.sglang.calls import Call
from rollgym.engines.sglang.client import Unreached
from rollgym.engines.sglang.fleet import Fleet
from rollgym.engines.sglang.wire import TOKEN_BYTES, Piece, body, check_request, read
from rollgym.errors import AgentError, EngineLost

_ABORT_SECONDS = 0.2
"""How long to wait before an abort is repeated: one that comes before its request is lost."""


class Desk:
    """All replies under way at one fleet."""

    def __init__(self, fleet: Fleet, vocabulary: int, version: int) -> None:
        self.fleet = fleet
        self.vocabulary = vocabulary
        self.history = [version]
        """Every version of the weights so far."""
        self.gate = asyncio.Event()
        """Closed while nothing is to be generated."""
        self.gate.set()
        self.failure: AgentError | None = None
        """Why nothing will ever be generated again."""
        self.calls: set[Call] = set()
        self.lost: Callable[[], Awaitable[None]] | None = None
        """What to do where a server has died; without it, nothing can be done."""
        self.answered = 0
        """Replies, or parts of them, so far."""
        self._live: set[asyncio.Task[bytes]] = set()
        self._chores: set[asyncio.Task[Any]] = set()
        self._interruptions = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """Draw one reply, in as many calls as it takes."""
        call = Call(request, check_request(request, self.vocabulary, self.fleet.context))
        self.calls.add(call)
        try:
            while True:
                await self._enter(call)
                if call.aborted.is_set():
                    return call.made("aborted")
                interruptions = self._interruptions
                piece = await self._piece(call)
                if piece is None:
                    continue
                reason = call.add(piece)
                if reason is not None:
                    return call.made(reason)
                if call.aborted.is_set():
                    return call.made("aborted")
                if piece.kind == "abort" and interruptions == self._interruptions:
                    raise AgentError(f"{self.fleet.front.url} aborted a reply that nobody here asked to end.")
        finally:
            self.calls.discard(call)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these replies."""
        wanted = frozenset(request_ids)
        found = [call for call in self.calls if call.request.request_id in wanted]
        for call in found:
            call.aborted.set()
        await asyncio.gather(*(self._end(call) for call in found))

    async def interrupt(self) -> None:
        """End all calls that are out; their replies will be asked for again from where they are."""
        self._interruptions += 1
        while self._live:
            await self.fleet.abort()
            if self._live:  # they may all have ended in the meantime
                await asyncio.wait(self._live, timeout=_ABORT_SECONDS)

    def hang_up(self) -> None:
        """Drop all calls that are out: nobody is there to answer."""
        for task in self._live:
            task.cancel()

    def fail(self, failure: AgentError) -> None:
        """Fail what waits, and whatever comes."""
        self.failure = failure
        self.gate.set()
        self.hang_up()

    async def close(self) -> None:
        """Fail everything, and end what is being done in the background."""
        self.fail(AgentError("The engine was closed."))
        for task in self._chores:
            task.cancel()
        while self._live or self._chores:
            await asyncio.wait([*self._live, *self._chores])
            await asyncio.sleep(0)

    def later(self, chore: Coroutine[Any, Any, Any]) -> asyncio.Task[None]:
        """Have something done that nobody waits for."""

        async def quietly() -> None:
            with suppress(AgentError):
                await chore

        task = asyncio.create_task(quietly())
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        return task

    async def _enter(self, call: Call) -> None:
        """Wait until there is generating again, or the reply is to end."""
        began = time.perf_counter()
        while not self.gate.is_set() and not call.aborted.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, call.aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waits:
                    one.cancel()
        call.waited += time.perf_counter() - began
        if self.failure is not None:
            raise self.failure
        if not call.aborted.is_set():
            for worker in self.fleet.workers:
                worker.state.may_generate()

    async def _piece(self, call: Call) -> Piece | None:
        """Ask for the rest of a reply; ``None`` where the server was dead before it could hear of it."""
        rid, most, sampling = call.renew(), call.room, call.request.sampling
        asked = body(rid, call.ids, sampling, most, self.fleet.seeded)
        first = len(self.history) - 1
        try:
            answer = await self._answer(call, asked, (1 << 20) + TOKEN_BYTES * most)
        except Unreached:
            if self.lost is None:
                raise
            await self.lost()
            return None
        except EngineLost:
            if self.lost is not None:
                self.later(_await(self.lost))
            raise
        known, where = self.history[first:], self.fleet.front.url

        def number(name: str) -> int:
            """The version that a server means, which must be one it was given."""
            if name.isascii() and name.isdigit() and len(name) < 20 and int(name) in known:
                return int(name)
            raise EngineLost(
                f"{where} generated with weights called {name[:40]!r} instead of {known[-1]}: "
                "it was started again or updated by somebody else."
            )

        piece = read(answer, rid, sampling, most, self.vocabulary, number, where)
        self.answered += 1
        return piece

    async def _answer(self, call: Call, asked: dict[str, Any], limit: int) -> bytes:
        session = call.request.session
        headers = {"X-SMG-Routing-Key": session} if session.isascii() and session.isprintable() else {}
        task = call.task = asyncio.create_task(self.fleet.front.generate(asked, limit, headers))
        self._live.add(task)
        task.add_done_callback(self._left)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise self.failure or EngineLost(
                    f"{self.fleet.front.url} died in the middle of a reply."
                ) from None
            call.aborted.set()
            self.later(self._end(call))
            raise

    def _left(self, task: asyncio.Task[bytes]) -> None:
        self._live.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited for it has it, and a reply nobody waits for may fail
        self.tidy()

    def tidy(self) -> None:
        """Have caches flushed that older weights filled, where nothing is running."""
        if not self._live and self.gate.is_set() and any(one.state.stale for one in self.fleet.workers):
            self.later(self.fleet.flush_stale())

    async def _end(self, call: Call) -> None:
        """Have a server end a reply, again until it has."""
        while call.task is not None and not call.task.done():
            with suppress(AgentError):
                await self.fleet.abort(call.rid)
            await asyncio.wait([call.task], timeout=_ABORT_SECONDS)


async def _await(work: Callable[[], Awaitable[None]]) -> None:
    await work()
