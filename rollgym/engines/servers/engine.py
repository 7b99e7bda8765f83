"""`ServerEngine`: an `Engine` over HTTP, the base of the engines for SGLang and vLLM."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, cast

from rollgym.core.errors import AgentError, EngineLost, UsageError
from rollgym.engines.base import (
    MEMORY_TAGS,
    Engine,
    EngineStats,
    GenerateRequest,
    Generation,
    WeightSource,
)
from rollgym.engines.router import gather
from rollgym.engines.servers.request_tracker import RequestTracker
from rollgym.engines.servers.route_choice import RouteChoice, choose_route
from rollgym.engines.servers.server_group import ServerGroup
from rollgym.engines.servers.server_process import ServerProcess
from rollgym.engines.servers.weight_delta import DeltaEncoder
from rollgym.engines.servers.weights import BUCKET, Route, WeightSender, copy_weights, is_local
from rollgym.engines.weight_sync.chain import WeightChain
from rollgym.models.hf_files import HFModelFiles


class ServerEngine(Engine):
    """An `Engine` over HTTP for one address.

    Args:
        url: Address of a running server or router.
        model_folder: Local folder of the model it runs: token ids and weights are checked against it.
        server: A started child process instead of ``url``; it is restarted when it dies.
        version: Version of its weights. Default: as reported by the server, else 0.
        interrupt: In-flight replies on a weight update: one of ``modes``.
        route: How tensors are sent: in the HTTP call (``tensor``), by a broadcast (``group``), or through a
            shared folder (``disk``); default: as `choose_route` chooses.
        host: Address of this machine as seen by the servers, for a broadcast.
        bucket: Bytes of weights per call.
        delta: Send only what changed since the last update: values where the servers have rollgym's plugin,
            else tensors.
        full_update_every: With ``delta``, every n-th update has all tensors.
        timeout: Seconds per call.
        retries: Further attempts if a server cannot be reached.
        restarts: Maximum number of consecutive restarts of a child process.
        api_key: Key of the server at ``url``; a child process has its own.
    """

    servers_class: ClassVar[type[ServerGroup]]
    sender_class: ClassVar[type[WeightSender]]
    modes: ClassVar[Mapping[str, str]]
    """Mode in which the servers are paused, by value of ``interrupt``, the default first."""
    small: ClassVar[int] = 0
    """Bytes of weights below which the call is the default route."""

    def __init__(
        self,
        url: str | None = None,
        model_folder: str | Path | None = None,
        *,
        server: ServerProcess | None = None,
        version: int | None = None,
        interrupt: str | None = None,
        route: Route | None = None,
        host: str | None = None,
        bucket: int = BUCKET,
        delta: bool = False,
        full_update_every: int = 16,
        timeout: float = 600.0,
        retries: int = 4,
        restarts: int = 3,
        api_key: str | None = None,
    ) -> None:
        name = type(self).__name__
        if (url is None) == (server is None) or model_folder is None:
            raise UsageError(f"{name} needs model_folder, and either url or server.")
        interrupt = next(iter(self.modes)) if interrupt is None else interrupt
        if interrupt not in self.modes:
            raise UsageError(f"interrupt must be one of {', '.join(self.modes)}, not {interrupt!r}.")
        self.server = server
        self.model = HFModelFiles.read(model_folder)
        self.restarts = restarts
        key = api_key if server is None else server.api_key
        self._options: dict[str, Any] = {"timeout": timeout, "retries": retries, "api_key": key}
        self._options["experts"] = self.model.experts
        address = url if server is None else server.url
        assert address is not None
        servers, first = self.servers_class.connect(address, version, **self._options)
        self.check_servers(servers, interrupt)
        self._tracker = RequestTracker(servers, self.model.vocabulary, first)
        self._tracker.on_lost = None if server is None else self._restarted
        self._mode = self.modes[interrupt]
        self.route_reason = "as set"
        """Why this route."""
        if route is None:
            choice = self._choose_route(servers, host)
            route, self.route_reason = cast(Route, choice.route), choice.reason
        self.check_route(servers, route)
        deltas = DeltaEncoder(full_update_every) if delta else None
        self._sender = self.sender_class(
            self.model, route, bucket=bucket, host=host, timeout=min(timeout, 300.0), deltas=deltas
        )
        self._lock = asyncio.Lock()
        """Held while the state of the servers changes."""
        self._paused = False
        """Whether `pause` or `sleep` was called."""
        self._last_weights: WeightSource | None = None
        """For a server that is restarted or wakes up without new weights."""
        self._deaths = 0
        self._answered_before = 0
        """Replies received before the last restart."""
        self._restarting: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self._tracker.history[-1]

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and reply together that the servers support."""
        return self._servers.context

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary: valid ids are 0 to ``vocabulary - 1``."""
        return self.model.vocabulary

    @property
    def in_flight(self) -> int:
        """Number of replies in flight."""
        return len(self._tracker.pending)

    @property
    def route(self) -> Route:
        """Route of tensors to the servers."""
        return self._sender.route

    @property
    def weight_dtype(self) -> str:
        """The dtype in which weights are sent: that of the servers, or float32 if they do not report it."""
        return self._weight_dtype(self._servers)

    @property
    def weight_route(self) -> str:
        """The same as `route`."""
        return self.route

    @property
    def weight_bytes_sent(self) -> int | None:
        """Bytes of the last weight update to each server; ``None``: all weights."""
        return self._sender.sent_bytes

    def check_servers(self, servers: ServerGroup, interrupt: str) -> None:
        """Raise `UsageError` if the servers do not support the ``interrupt`` mode."""

    def check_route(self, servers: ServerGroup, route: Route) -> None:
        """Raise `UsageError` if the servers cannot receive weights by this route."""

    def supported_routes(self, servers: ServerGroup) -> Sequence[Route]:
        """Return the routes that these servers support."""
        return self.sender_class.routes

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply. A cancelled call stops generating at once."""
        return await self._tracker.generate(request)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these replies now; each returns its tokens so far as ``aborted``. Ignores unknown ids."""
        await self._tracker.abort(request_ids)

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Use new weights from the next token on; ``interrupt`` decides about in-flight replies."""
        if type(version) is not int or not 0 <= version < 10**18:
            raise UsageError(f"The weight version must be an integer >= 0, not {version!r}.")
        dtype = self.weight_dtype
        source = self._sender.check(self._servers, await asyncio.to_thread(_fetched, weights, dtype))
        source = await asyncio.to_thread(copy_weights, source, dtype)
        async with self._lock:
            await self._with_restart(lambda: self._update(version, source))
            self._last_weights = source

    async def pause(self) -> None:
        """Stop generating until `resume`; requests wait."""
        async with self._lock:
            self._paused = True
            await self._with_restart(lambda: self._stop_generating(self._mode))

    async def resume(self) -> None:
        """Continue after `pause` or `sleep`; released memory is reallocated, with the last weights."""
        async with self._lock:
            self._paused = False
            await self._with_restart(self._wake_up)

    async def sleep(self, tags: Sequence[str] = MEMORY_TAGS, *, replicas: Sequence[int] | None = None) -> int:
        """Pause and release memory. New weights reallocate theirs. Returns 0: servers do not report bytes."""
        if not tags:
            await self.pause()
            return 0
        async with self._lock:
            self._paused = True
            await self._with_restart(lambda: self._sleep(tags))
        return 0

    async def resume_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Reallocate released memory before `wake_up`; memory that was not released is left alone."""
        async with self._lock:
            await self._with_restart(lambda: self._servers.resume_memory(tags))

    async def reconnect(self) -> bool:
        """Connect to a lost server again, or restart a child process; raises if that fails."""
        async with self._lock:
            if self.server is not None:
                await self._with_restart(self._restart)
                return True
            url = self._servers.front.url
            servers, version = await asyncio.to_thread(
                lambda: self.servers_class.connect(url, None, **self._options)
            )
            await self._servers.close()
            self._sender.forget_servers()
            self._tracker.servers = servers
            self._tracker.history.append(version)
        return True

    async def forget(self, session: str) -> None:
        """Do nothing: a server evicts unused cache entries on its own."""

    async def stats(self) -> EngineStats:
        """Replies in flight, and tokens computed and found in prefix caches, as far as servers report it."""
        tracker = self._tracker
        return EngineStats(
            running=self.in_flight,
            computed_tokens=tracker.computed_tokens,
            prefix_hit_tokens=tracker.prefix_hit_tokens,
        )

    async def close(self) -> None:
        """Stop, and fail all pending requests. A child process ends; another server keeps running."""
        rids = [call.rid for call in self._tracker.pending if call.task is not None]
        await self._tracker.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.close)
            self._servers.abandon()
        with suppress(AgentError):
            await self._sender.close(self._servers)
            for rid in rids if self.server is None else ():
                await self._servers.abort(rid)
        await self._servers.close()

    def _weight_dtype(self, servers: ServerGroup) -> str:
        return self.model.dtype if servers.dtype == "auto" else servers.dtype or "float32"

    def _choose_route(self, servers: ServerGroup, host: str | None) -> RouteChoice:
        import torch

        dtype: torch.dtype = getattr(torch, self._weight_dtype(servers))
        return choose_route(
            self.supported_routes(servers),
            nbytes=sum(math.prod(shape) for shape in self.model.shapes.values()) * dtype.itemsize,
            local=all(is_local(worker.client.url) for worker in servers.workers),
            host=host is not None,
            shares_gpu=torch.cuda.is_available(),
            small=self.small,
        )

    @property
    def _servers(self) -> ServerGroup:
        return self._tracker.servers

    async def _stop_generating(self, mode: str) -> None:
        """Pause the servers; mode ``abort`` interrupts in-flight replies first."""
        self._tracker.gate.clear()
        if mode == "abort":
            if any(worker.state.paused not in (None, "abort") for worker in self._servers.workers):
                await self._servers.resume()
            # Before the pause: with replies in flight, a server takes a second to pause.
            await self._tracker.interrupt()
        await self._servers.pause(mode)

    async def _sleep(self, tags: Sequence[str]) -> None:
        await self._stop_generating("abort")
        await self._servers.release(tags)

    async def _wake_up(self) -> None:
        """Reallocate memory, send the last weights if theirs was released, and continue."""
        await self._servers.resume_memory(MEMORY_TAGS)
        if any(worker.state.weights_missing for worker in self._servers.workers):
            last = self._last_weights or WeightSource(path=self.model.path.absolute())
            await self._sender.send(self._servers, self.version, last)
        await self._continue()

    async def _continue(self) -> None:
        await self._servers.resume()
        self._tracker.gate.set()
        self._tracker.flush_if_idle()

    async def _update(self, version: int, source: WeightSource) -> None:
        """Update the weights of the paused servers, and continue unless `pause` was called before."""
        if not self._paused:
            await self._stop_generating(self._mode)
        await self._servers.resume_memory(["weights"])
        await self._sender.send(self._servers, version, source)
        self._tracker.history.append(version)
        if not self._paused:
            await self._continue()

    async def _with_restart(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work``; if a child process has died, restart it and run ``work`` again, once."""
        if self._tracker.failure is not None:
            raise self._tracker.failure
        try:
            try:
                await work()
            except EngineLost:
                if self.server is None:
                    raise
                await self._restart()
                await work()
        except BaseException:
            if not self._paused:
                with suppress(AgentError):
                    await self._servers.resume()
                self._tracker.gate.set()
            raise

    async def _restarted(self) -> None:
        """Wait until a dead child process is restarted."""
        if self._restarting is None or self._restarting.done():
            self._tracker.gate.clear()

            async def restart() -> None:
                async with self._lock:
                    await self._restart()

            self._restarting = self._tracker.in_background(restart())
        await asyncio.wait([self._restarting])

    async def _restart(self) -> None:
        """Restart the server if it is not healthy, with the last weights and in its previous state."""
        assert self.server is not None
        try:
            paused = any(worker.state.paused is not None for worker in self._servers.workers)
            if not await asyncio.to_thread(self.server.healthy, paused=paused):
                await self._restart_server(self.server)
            if not self._paused:
                await self._continue()
        except AgentError as error:
            failure = EngineLost(str(error))
            self._tracker.fail(self._tracker.failure or failure)
            raise failure from error

    async def _restart_server(self, server: ServerProcess) -> None:
        self._deaths = self._deaths + 1 if self._tracker.answered == self._answered_before else 1
        self._answered_before = self._tracker.answered
        if self._deaths > self.restarts:
            raise EngineLost(
                f"The {server.software} server died {self._deaths} times in a row; end of its log:\n"
                f"{server.log}"
            )
        released = sorted({tag for worker in self._servers.workers for tag in worker.state.released})
        self._tracker.cancel_all()
        await asyncio.to_thread(server.restart)
        await self._servers.close()
        self._sender.forget_servers()
        first = None if self._last_weights is not None else self.version
        self._tracker.servers, _ = await asyncio.to_thread(
            lambda: self.servers_class.connect(server.url, first, **self._options)
        )
        if self._last_weights is not None:
            await self._servers.pause("abort")
            await self._sender.send(self._servers, self.version, self._last_weights)
        if released:
            await self._servers.pause("abort")
            await self._servers.release(released)
        elif self._paused:
            await self._servers.pause("abort")


def _fetched(weights: WeightSource, dtype: str) -> WeightSource:
    """Return weights whose tensors are in this process."""
    if isinstance(weights.tensors, WeightChain):
        return WeightSource(tensors=weights.tensors.fetch())
    return gather(weights, dtype)
