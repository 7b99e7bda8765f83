"""`SglangEngine`: an `Engine` that is one SGLang server, or a router with several behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollgym.engines import GenerateRequest, Generation, WeightSource
from rollgym.engines.replicas import gather
from rollgym.engines.sglang.contract import Contract, Interrupt
from rollgym.engines.sglang.desk import Desk
from rollgym.engines.sglang.fleet import Fleet
from rollgym.engines.sglang.folder import ModelFolder
from rollgym.engines.sglang.server import Server
from rollgym.engines.sglang.state import TAGS, Mode
from rollgym.engines.sglang.weights import BUCKET, ROUTES, Route, Sender, keep
from rollgym.errors import AgentError, EngineLost, UsageError

_MODES: dict[Interrupt, Mode] = {"resend": "abort", "in_place": "in_place", "retract": "retract"}


class SglangEngine:
    """An `Engine` over HTTP.

    Args:
        url: of a server or router that runs already.
        model_folder: the model it runs, as a folder here: token ids and weights are checked against it.
        server: a process of ours instead of ``url``, started already; it is started again when it dies.
        version: of the weights it has. Default: what the server says, else 0.
        interrupt: what becomes of replies under way when weights change. ``resend``: they are interrupted,
            and asked for again from where they were. ``in_place`` (SGLang 0.5.19): they go on, with keys and
            values of the old weights. ``retract`` (0.5.22): they go on, and compute those anew.
        route: how tensors get to the server: in the call (``tensor``), by a broadcast (``group``), or by a
            folder that it can read, too (``disk``).
        host: where servers reach this machine, for a broadcast.
        bucket: bytes of weights in one call.
        timeout: seconds for one call.
        retries: further attempts where a server cannot be reached.
        restarts: how often in a row a server of ours is started again.
        api_key: that the server at ``url`` asks for; a process of ours has a key of its own.
    """

    def __init__(
        self,
        url: str | None = None,
        model_folder: str | Path | None = None,
        *,
        server: Server | None = None,
        version: int | None = None,
        interrupt: Interrupt = "resend",
        route: Route = "tensor",
        host: str | None = None,
        bucket: int = BUCKET,
        timeout: float = 600.0,
        retries: int = 4,
        restarts: int = 3,
        api_key: str | None = None,
    ) -> None:
        if (url is None) == (server is None) or model_folder is None:
            raise UsageError("An SGLang engine needs the url of a server and the model_folder it runs.")
        if route not in ROUTES:
            raise UsageError(f"route must be one of {', '.join(ROUTES)}, not {route!r}.")
        self.server = server
        self.model = ModelFolder.read(model_folder)
        self.restarts = restarts
        key = api_key if server is None else server.api_key
        self._options: dict[str, Any] = {"timeout": timeout, "retries": retries, "api_key": key}
        address = url if server is None else server.url
        assert address is not None
        fleet, first = Fleet.connect(address, version, **self._options)
        fleet.contract.check(interrupt, fleet.front.url)
        self._desk = Desk(fleet, self.model.vocabulary, first)
        self._desk.lost = None if server is None else self._revived
        self._mode: Mode = _MODES[interrupt]
        self._sender = Sender(self.model, route, bucket=bucket, host=host, timeout=min(timeout, 300.0))
        self._lock = asyncio.Lock()
        """Held by whoever changes the state of the servers."""
        self._held = False
        """Whether `pause` was called."""
        self._kept: WeightSource | None = None
        """The last weights, for a server that is started again or has given up their memory."""
        self._deaths = 0
        self._seen = 0
        self._reviving: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """Of the weights in use."""
        return self._desk.history[-1]

    @property
    def context_length(self) -> int:
        """The longest prompt and reply together: a little less than the model's own."""
        return self._fleet.context

    @property
    def vocabulary(self) -> int:
        """How many token ids the model knows, from 0."""
        return self.model.vocabulary

    @property
    def contract(self) -> Contract:
        """What the server can do."""
        return self._fleet.contract

    @property
    def in_flight(self) -> int:
        """Replies under way."""
        return len(self._desk.calls)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Draw one reply. A cancelled call stops generating at once. `BadRequest` where it cannot."""
        return await self._desk.generate(request)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these replies now; each returns what it has, as ``aborted``. Unknown ids are ignored."""
        await self._desk.abort(request_ids)

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Use new weights from the next token on (`interrupt` says what becomes of replies under way)."""
        if type(version) is not int or not 0 <= version < 10**18:
            raise UsageError(f"The version of weights is a whole number from 0 on, not {version!r}.")
        source = self._sender.check(self._fleet, await asyncio.to_thread(gather, weights))
        kept = await asyncio.to_thread(keep, source)
        async with self._lock:
            await self._surely(lambda: self._swap(version, source))
            self._kept = kept

    async def pause(self) -> None:
        """Generate nothing until `resume`; requests wait."""
        async with self._lock:
            self._held = True
            await self._surely(lambda: self._halt(self._mode))

    async def resume(self) -> None:
        """Go on; memory that was given up is taken back first, with the last weights."""
        async with self._lock:
            self._held = False
            await self._surely(self._take_up)

    async def release(self, *, weights: bool = True) -> int:
        """Pause, and give up memory: the cache's and, unless told otherwise, the weights'.

        New weights take theirs back as they come. Returns bytes in other engines; a server says none: 0.
        """
        await self.release_memory(TAGS if weights else ("kv_cache",))
        return 0

    async def release_memory(self, tags: Sequence[str] = TAGS) -> None:
        """Pause, and give up the memory of ``kv_cache``, ``weights`` or both."""
        async with self._lock:
            self._held = True
            await self._surely(lambda: self._give_up(tags))

    async def resume_memory(self, tags: Sequence[str] = TAGS) -> None:
        """Take memory back early; what was never given up is left alone. `resume` then goes on."""
        async with self._lock:
            await self._surely(lambda: self._fleet.take_back(tags))

    async def ready(self) -> None:
        """Find a server again that was lost, or raise: ours is started again; another's wants new weights."""
        async with self._lock:
            if self.server is not None:
                await self._surely(self._revive)
                return
            url = self._fleet.front.url
            fleet, version = await asyncio.to_thread(lambda: Fleet.connect(url, None, **self._options))
            await self._fleet.close()
            self._sender.forget()
            self._desk.fleet = fleet
            self._desk.history.append(version)

    async def forget(self, session: str) -> None:
        """Nothing: a server drops by itself what was not used for long."""

    async def close(self) -> None:
        """Stop, and fail what still waits. A server of ours ends; another goes on."""
        rids = [call.rid for call in self._desk.calls if call.task is not None]
        await self._desk.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.close)
            self._fleet.abandon()
        with suppress(AgentError):
            await self._sender.close(self._fleet)
            for rid in rids if self.server is None else ():
                await self._fleet.abort(rid)
        await self._fleet.close()

    @property
    def _fleet(self) -> Fleet:
        return self._desk.fleet

    async def _halt(self, mode: Mode) -> None:
        """Have nothing generated from now on."""
        self._desk.gate.clear()
        if mode == "abort":
            if any(worker.state.paused not in (None, "abort") for worker in self._fleet.workers):
                await self._fleet.go_on()
            # Before the pause: with replies under way, a server takes a second over that.
            await self._desk.interrupt()
        await self._fleet.pause(mode)

    async def _give_up(self, tags: Sequence[str]) -> None:
        await self._halt("abort")
        await self._fleet.release(tags)

    async def _take_up(self) -> None:
        """Take memory back and go on. What was in it is gone, unless weights came meanwhile."""
        await self._fleet.take_back(TAGS)
        if any(worker.state.empty for worker in self._fleet.workers):
            last = self._kept or WeightSource(path=self.model.path.absolute())
            await self._sender.send(self._fleet, self.version, last)
        await self._go_on()

    async def _go_on(self) -> None:
        await self._fleet.go_on()
        self._desk.gate.set()
        self._desk.tidy()

    async def _swap(self, version: int, source: WeightSource) -> None:
        """Change the weights of paused servers, and go on unless `pause` was called before."""
        if not self._held:
            await self._halt(self._mode)
        await self._fleet.take_back(["weights"])
        await self._sender.send(self._fleet, version, source)
        self._desk.history.append(version)
        if not self._held:
            await self._go_on()

    async def _surely(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do something with the servers; one of ours that has died is started again for it, once."""
        if self._desk.failure is not None:
            raise self._desk.failure
        try:
            try:
                await work()
            except EngineLost:
                if self.server is None:
                    raise
                await self._revive()
                await work()
        except BaseException:
            if not self._held:
                with suppress(AgentError):
                    await self._fleet.go_on()
                self._desk.gate.set()
            raise

    async def _revived(self) -> None:
        """Wait until a server of ours that has died is back."""
        if self._reviving is None or self._reviving.done():
            self._desk.gate.clear()

            async def revive() -> None:
                async with self._lock:
                    await self._revive()

            self._reviving = self._desk.later(revive())
        await asyncio.wait([self._reviving])

    async def _revive(self) -> None:
        """Start the server again, with the last weights and in the state it was in."""
        assert self.server is not None
        try:
            paused = any(worker.state.paused is not None for worker in self._fleet.workers)
            if not await asyncio.to_thread(self.server.healthy, paused=paused):
                await self._start_again(self.server)
            if not self._held:
                await self._go_on()
        except AgentError as error:
            failure = EngineLost(str(error))
            self._desk.fail(self._desk.failure or failure)
            raise failure from error

    async def _start_again(self, server: Server) -> None:
        self._deaths = self._deaths + 1 if self._desk.answered == self._seen else 1
        self._seen = self._desk.answered
        if self._deaths > self.restarts:
            raise EngineLost(
                f"The SGLang server died {self._deaths} times in a row; its log ends:\n{server.log}"
            )
        released = sorted({tag for worker in self._fleet.workers for tag in worker.state.released})
        self._desk.hang_up()
        await asyncio.to_thread(server.restart)
        await self._fleet.close()
        self._sender.forget()
        first = None if self._kept is not None else self.version
        self._desk.fleet, _ = await asyncio.to_thread(
            lambda: Fleet.connect(server.url, first, **self._options)
        )
        if self._kept is not None:
            await self._fleet.pause("abort")
            await self._sender.send(self._fleet, self.version, self._kept)
        if released:
            await self._fleet.pause("abort")
            await self._fleet.release(released)
        elif self._held:
            await self._fleet.pause("abort")
