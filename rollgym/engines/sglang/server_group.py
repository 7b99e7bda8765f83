"""The servers behind one address: a single one, or the workers of a router. Control calls go to each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from rollgym.core.errors import AgentError, UsageError
from rollgym.engines.sglang.client import Client, Refused, transport
from rollgym.engines.sglang.server_state import Compat, Mode, ServerState, compat_of

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ServerWorker:
    """One server: its client, tracked state and tensor parallelism."""

    client: Client
    state: ServerState
    tp: int
    """Number of processes that share the model."""


class ServerGroup:
    """The address that requests are sent to, and the servers behind it."""

    def __init__(self, front: Client, workers: Sequence[ServerWorker], *, context: int, seeded: bool) -> None:
        self.front = front
        self.workers = list(workers)
        self.context = context
        """Maximum number of tokens of prompt and reply together that every server supports."""
        self.seeded = seeded
        """Whether the servers sample with the request's seed."""

    @property
    def compat(self) -> Compat:
        """Features that all servers support."""
        return min((worker.state.compat for worker in self.workers), key=lambda one: one.version)

    @classmethod
    def connect(
        cls, url: str, version: int | None, *, timeout: float, retries: int, api_key: str | None = None
    ) -> tuple[ServerGroup, int]:
        """Connect to the servers at an address; returns the group and the version of their weights."""
        front = Client(url, timeout=timeout, retries=retries, api_key=api_key)
        clients = [
            Client(one, timeout=timeout, retries=retries, api_key=api_key) for one in _addresses(front)
        ]
        infos = [_get_object(client, "/server_info") for client in clients]
        workers = [
            ServerWorker(
                client,
                ServerState(compat_of(info.get("version"), client.url)),
                _positive_int(info, "tp_size") or 1,
            )
            for client, info in zip(clients, infos, strict=True)
        ]
        context = min(_context(client, info) for client, info in zip(clients, infos, strict=True))
        seeded = all(info.get("enable_deterministic_inference") is True for info in infos)
        servers = cls(front, workers, context=context, seeded=seeded)
        if not servers.compat.tested:
            log.warning("%s runs an SGLang version that rollgym was not tested with.", url)
        return servers, servers._agree(version)

    async def each(self, do: Callable[[ServerWorker], Awaitable[Any]]) -> None:
        """Call ``do`` with every server in parallel; raises the first failure after all have finished."""
        results = await asyncio.gather(*(do(one) for one in self.workers), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def pause(self, mode: Mode) -> None:
        """Pause generation."""

        async def one(worker: ServerWorker) -> None:
            if worker.state.paused not in (None, mode):
                await self._resume(worker)
            if worker.state.pause(mode):
                try:
                    await worker.client.post("/pause_generation", {"mode": mode})
                except AgentError:
                    worker.state.paused = None
                    raise

        await self.each(one)

    async def resume(self) -> None:
        """Continue generation; idle servers flush cache entries of older weights first."""
        await self.each(self._resume)

    async def abort(self, rid: str | None = None) -> None:
        """Abort one request or all; unknown ids are ignored."""
        what: dict[str, Any] = {"abort_all": True, "rid": ""} if rid is None else {"rid": rid}
        await self.each(lambda worker: worker.client.post("/abort_request", what))

    async def flush_stale(self) -> None:
        """Flush caches that may contain entries of older weights; skips busy servers."""

        async def one(worker: ServerWorker) -> None:
            if worker.state.stale:
                with suppress(Refused):  # busy: flushed later
                    await worker.client.post("/flush_cache", {})
                    worker.state.flushed()

        await self.each(one)

    async def release(self, tags: Sequence[str]) -> None:
        """Release memory."""

        async def one(worker: ServerWorker) -> None:
            if to_send := worker.state.release(tags, live=0):
                try:
                    await worker.client.post("/release_memory_occupation", {"tags": to_send})
                except AgentError:
                    # The server may not have received it, and resuming memory it holds would crash it.
                    worker.state.released.difference_update(to_send)
                    raise

        await self.each(one)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Reallocate memory."""

        async def one(worker: ServerWorker) -> None:
            if to_send := worker.state.resume_memory(tags):
                await worker.client.post("/resume_memory_occupation", {"tags": to_send})

        await self.each(one)

    def abandon(self) -> None:
        """Forget the servers, which are gone."""
        self.workers.clear()

    async def close(self) -> None:
        """Close the connections."""
        for client in (self.front, *(worker.client for worker in self.workers)):
            await client.close()

    async def _resume(self, worker: ServerWorker) -> None:
        state = worker.state
        if state.paused == "abort" and state.stale and "kv_cache" not in state.released:
            await worker.client.post("/flush_cache", {})
            state.flushed()
        if state.resume():
            await worker.client.post("/continue_generation", {})

    def _agree(self, version: int | None) -> int:
        """Return the version of the servers' weights; sets it on servers that report another name."""
        reported = {
            worker.client.url: str(_get_object(worker.client, "/model_info").get("weight_version"))
            for worker in self.workers
        }
        names = set(reported.values())
        if len(names) > 1:
            listed = ", ".join(f"{url} has {name}" for url, name in reported.items())
            raise UsageError(f"The servers have weights of different versions: {listed}.")
        name = names.pop()
        if version is None:
            version = int(name) if name.isascii() and name.isdigit() else 0
        if name != str(version):
            for worker in self.workers:
                _set_weight_version(worker.client, version)
        return version


def _addresses(front: Client) -> list[str]:
    """Return the workers of a router, or the address itself."""
    answer = front.ask("/workers")
    if not isinstance(answer, dict) or not isinstance(answer.get("workers"), list):
        return [front.url]
    urls = [worker.get("url") for worker in answer["workers"] if isinstance(worker, dict)]
    valid = [url for url in urls if isinstance(url, str)]
    if not valid:
        raise UsageError(f"The router at {front.url} has no workers.")
    return valid


def _get_object(client: Client, path: str) -> dict[str, Any]:
    answer = client.ask(path)
    if not isinstance(answer, dict):
        raise UsageError(f"{client.url} is not an SGLang server: it has no {path}.")
    return answer


def _positive_int(info: dict[str, Any], name: str) -> int | None:
    value = info.get(name)
    return value if type(value) is int and value > 0 else None


def _context(client: Client, info: dict[str, Any]) -> int:
    """Return the maximum prompt length; a server generates at most a few tokens beyond it."""
    length = _positive_int(info, "max_req_input_len")
    if length is None:
        raise AgentError(f"{client.url} does not report max_req_input_len, the maximum prompt length.")
    return length


def _set_weight_version(client: Client, version: int) -> None:
    body = {"new_version": str(version), "abort_all_requests": False}
    try:
        with httpx.Client(timeout=30.0, **transport(client.url)) as http:
            answer = http.post(f"{client.url}/update_weight_version", json=body, headers=client.headers)
    except httpx.HTTPError as error:
        raise AgentError(f"{client.url} does not accept a weight version: {error}.") from None
    if answer.status_code != 200:
        raise AgentError(f"{client.url} does not accept a weight version: it answered {answer.status_code}.")
