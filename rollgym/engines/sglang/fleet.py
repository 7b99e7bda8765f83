"""The servers behind one address: one, or the workers of a router. Control calls go to each of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from rollgym.engines.sglang.client import Client, Refused, transport
from rollgym.engines.sglang.contract import Contract, contract_of
from rollgym.engines.sglang.state import Mode, ServerState
from rollgym.errors import AgentError, UsageError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Worker:
    """One server."""

    client: Client
    state: ServerState
    tp: int
    """How many processes share its model."""


class Fleet:
    """What requests are sent to, and the servers that do the work."""

    def __init__(self, front: Client, workers: Sequence[Worker], *, context: int, seeded: bool) -> None:
        self.front = front
        self.workers = list(workers)
        self.context = context
        """The longest prompt and reply together that every server takes."""
        self.seeded = seeded
        """Whether a reply depends on its seed."""

    @property
    def contract(self) -> Contract:
        """What all of them can do."""
        return min((worker.state.contract for worker in self.workers), key=lambda one: one.version)

    @classmethod
    def connect(
        cls, url: str, version: int | None, *, timeout: float, retries: int, api_key: str | None = None
    ) -> tuple[Fleet, int]:
        """Get to know the servers at an address, and agree on the version of their weights."""
        front = Client(url, timeout=timeout, retries=retries, api_key=api_key)
        clients = [
            Client(one, timeout=timeout, retries=retries, api_key=api_key) for one in _addresses(front)
        ]
        facts = [_facts(client) for client in clients]
        workers = [
            Worker(
                client,
                ServerState(contract_of(said.get("version"), client.url)),
                _number(said, "tp_size") or 1,
            )
            for client, said in zip(clients, facts, strict=True)
        ]
        context = min(_context(client, said) for client, said in zip(clients, facts, strict=True))
        seeded = all(said.get("enable_deterministic_inference") is True for said in facts)
        fleet = cls(front, workers, context=context, seeded=seeded)
        if not fleet.contract.tested:
            log.warning("%s runs a version of SGLang that rollgym was not tested with.", url)
        return fleet, fleet._agree(version)

    async def each(self, do: Callable[[Worker], Awaitable[Any]]) -> None:
        """Do something with every server at once; the first failure is raised when all have answered."""
        results = await asyncio.gather(*(do(one) for one in self.workers), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def pause(self, mode: Mode) -> None:
        """Generate nothing."""

        async def one(worker: Worker) -> None:
            if worker.state.paused not in (None, mode):
                await self._go_on(worker)
            if worker.state.pause(mode):
                try:
                    await worker.client.post("/pause_generation", {"mode": mode})
                except AgentError:
                    worker.state.paused = None
                    raise

        await self.each(one)

    async def go_on(self) -> None:
        """Generate again; nothing that older weights computed is kept by a server that is idle."""
        await self.each(self._go_on)

    async def abort(self, rid: str | None = None) -> None:
        """End a reply, or all. One that no server knows is ignored."""
        what: dict[str, Any] = {"abort_all": True, "rid": ""} if rid is None else {"rid": rid}
        await self.each(lambda worker: worker.client.post("/abort_request", what))

    async def flush_stale(self) -> None:
        """Empty caches that may hold what older weights computed, where nothing is running."""

        async def one(worker: Worker) -> None:
            if worker.state.stale:
                with suppress(Refused):  # busy again: another time
                    await worker.client.post("/flush_cache", {})
                    worker.state.flushed()

        await self.each(one)

    async def release(self, tags: Sequence[str]) -> None:
        """Give up memory."""

        async def one(worker: Worker) -> None:
            if asked := worker.state.release(tags, live=0):
                try:
                    await worker.client.post("/release_memory_occupation", {"tags": asked})
                except AgentError:
                    # Perhaps it never heard of it, and then it must not be told to take it back.
                    worker.state.released.difference_update(asked)
                    raise

        await self.each(one)

    async def take_back(self, tags: Sequence[str]) -> None:
        """Take memory back."""

        async def one(worker: Worker) -> None:
            if asked := worker.state.take_back(tags):
                await worker.client.post("/resume_memory_occupation", {"tags": asked})

        await self.each(one)

    def abandon(self) -> None:
        """The servers are gone: there is nothing to tell them."""
        self.workers.clear()

    async def close(self) -> None:
        """Close the connections."""
        for client in (self.front, *(worker.client for worker in self.workers)):
            await client.close()

    async def _go_on(self, worker: Worker) -> None:
        state = worker.state
        if state.paused == "abort" and state.stale and "kv_cache" not in state.released:
            await worker.client.post("/flush_cache", {})
            state.flushed()
        if state.resume():
            await worker.client.post("/continue_generation", {})

    def _agree(self, version: int | None) -> int:
        """The number of the weights that the servers have; a name they were started with becomes one."""
        said = {worker.client.url: str(_info(worker.client).get("weight_version")) for worker in self.workers}
        names = set(said.values())
        if len(names) > 1:
            listed = ", ".join(f"{url} has {name}" for url, name in said.items())
            raise UsageError(f"The servers have weights of different versions: {listed}.")
        name = names.pop()
        if version is None:
            version = int(name) if name.isascii() and name.isdigit() else 0
        if name != str(version):
            for worker in self.workers:
                _name_weights(worker.client, version)
        return version


def _addresses(front: Client) -> list[str]:
    """The workers of a router, or the address itself."""
    found = front.ask("/workers")
    if not isinstance(found, dict) or not isinstance(found.get("workers"), list):
        return [front.url]
    urls = [one.get("url") for one in found["workers"] if isinstance(one, dict)]
    good = [one for one in urls if isinstance(one, str)]
    if not good:
        raise UsageError(f"The router at {front.url} has no workers.")
    return good


def _facts(client: Client) -> dict[str, Any]:
    said = client.ask("/server_info")
    if not isinstance(said, dict):
        raise UsageError(f"{client.url} answers, but is no SGLang server: it has no /server_info.")
    return said


def _info(client: Client) -> dict[str, Any]:
    said = client.ask("/model_info")
    if not isinstance(said, dict):
        raise UsageError(f"{client.url} answers, but is no SGLang server: it has no /model_info.")
    return said


def _number(said: dict[str, Any], name: str) -> int | None:
    value = said.get(name)
    return value if type(value) is int and value > 0 else None


def _context(client: Client, said: dict[str, Any]) -> int:
    """A prompt must be shorter than this, and a server never makes it longer than a few tokens more."""
    found = _number(said, "max_req_input_len")
    if found is None:
        raise AgentError(f"{client.url} does not say how long a prompt may be (max_req_input_len).")
    return found


def _name_weights(client: Client, version: int) -> None:
    body = {"new_version": str(version), "abort_all_requests": False}
    try:
        with httpx.Client(timeout=30.0, **transport(client.url)) as http:
            answer = http.post(f"{client.url}/update_weight_version", json=body, headers=client.headers)
    except httpx.HTTPError as error:
        raise AgentError(f"{client.url} does not take the name of its weights: {error}.") from None
    if answer.status_code != 200:
        raise AgentError(
            f"{client.url} does not take the name of its weights: it answered {answer.status_code}."
        )
