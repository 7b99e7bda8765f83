"""The servers behind one address: a single one, or the workers of a router. Control calls go to each.

`ServerGroup` tracks the state of the servers; a subclass for each software knows its routes.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rollgym.core.errors import AgentError, UsageError
from rollgym.engines.base import GenerateRequest, Sampling
from rollgym.engines.servers.client import Client, Refused
from rollgym.engines.servers.reply import Piece
from rollgym.engines.servers.server_state import ServerState
from rollgym.models.hf_files import ExpertShape


@dataclass(slots=True)
class ServerWorker:
    """One server: its client, tracked state and tensor parallelism."""

    client: Client
    state: ServerState
    tp: int
    """Number of processes that share the model."""


class ServerGroup(ABC):
    """The address that requests are sent to, and the servers behind it."""

    software: ClassVar[str]
    """Name of the servers' software, for messages."""
    deltas = False
    """Whether all servers apply changes of values (`DeltaEncoder`)."""

    def __init__(
        self,
        front: Client,
        workers: Sequence[ServerWorker],
        *,
        context: int,
        dtype: object = None,
        experts: ExpertShape | None = None,
    ) -> None:
        self.front = front
        self.workers = list(workers)
        self.context = context
        """Maximum number of tokens of prompt and reply together that every server supports."""
        self.dtype = dtype if dtype in ("float32", "bfloat16", "float16", "auto") else None
        """The dtype of the servers' model: ``auto``: that of its config; ``None``: they do not report it."""
        self.experts = experts
        """Shape of the experts that all servers report with each reply; ``None``: they report none."""

    @classmethod
    @abstractmethod
    def connect(
        cls,
        url: str,
        version: int | None,
        *,
        timeout: float,
        retries: int,
        api_key: str | None = None,
        experts: ExpertShape | None = None,
    ) -> tuple[Self, int]:
        """Connect to the servers at an address; returns the group and the version of their weights.

        ``experts`` is the shape of the model's experts.
        """

    @abstractmethod
    def check(self, request: GenerateRequest, vocabulary: int) -> int:
        """Return the maximum number of tokens of a reply, or raise `BadRequest`."""

    @abstractmethod
    def request_body(
        self, rid: str, ids: Sequence[int], sampling: Sampling, max_tokens: int, position: int
    ) -> dict[str, Any]:
        """Build the body of a call for the rest of a reply that has ``position`` tokens so far."""

    @abstractmethod
    async def generate(self, body: dict[str, Any], limit: int, session: str) -> bytes:
        """Send a generation request; the response has at most ``limit`` bytes."""

    @abstractmethod
    def read(
        self,
        answer: bytes,
        rid: str,
        prompt: int,
        sampling: Sampling,
        max_tokens: int,
        vocabulary: int,
        number: Callable[[str], int],
    ) -> Piece:
        """Parse and validate the answer to a generation request with ``prompt`` ids."""

    @abstractmethod
    async def send_pause(self, worker: ServerWorker, mode: str) -> None:
        """Pause a server."""

    @abstractmethod
    async def send_resume(self, worker: ServerWorker) -> None:
        """Continue a paused server."""

    @abstractmethod
    async def send_abort(self, worker: ServerWorker, rid: str | None) -> None:
        """Abort one request of a server, or all."""

    @abstractmethod
    async def send_flush(self, worker: ServerWorker) -> None:
        """Drop a server's prefix cache."""

    @abstractmethod
    async def send_release(self, worker: ServerWorker, tags: Sequence[str]) -> None:
        """Release memory of a paused, idle server."""

    @abstractmethod
    async def send_resume_memory(self, worker: ServerWorker, tags: Sequence[str]) -> None:
        """Reallocate memory of a server, which stays paused."""

    @abstractmethod
    async def weight_version(self, worker: ServerWorker) -> object:
        """Return the name of the version of a server's weights, as it reports it."""

    async def have_weights(self, version: str) -> bool:
        """Return whether all servers report this version of their weights."""
        return {await self.weight_version(worker) for worker in self.workers} == {version}

    def released_with(self, tags: Sequence[str]) -> Sequence[str]:
        """Return the memory that the servers release when these tags are asked for."""
        return tags

    async def each(self, do: Callable[[ServerWorker], Awaitable[Any]]) -> None:
        """Call ``do`` with every server in parallel; raises the first failure after all have finished."""
        results = await asyncio.gather(*(do(one) for one in self.workers), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def pause(self, mode: str) -> None:
        """Pause generation."""

        async def one(worker: ServerWorker) -> None:
            if worker.state.paused not in (None, mode):
                await self._resume(worker)
            if worker.state.pause(mode):
                try:
                    await self.send_pause(worker, mode)
                except AgentError:
                    worker.state.paused = None
                    raise

        await self.each(one)

    async def resume(self) -> None:
        """Continue generation; idle servers flush cache entries of older weights first."""
        await self.each(self._resume)

    async def abort(self, rid: str | None = None) -> None:
        """Abort one request or all; unknown ids are ignored."""
        await self.each(lambda worker: self.send_abort(worker, rid))

    async def flush_stale(self) -> None:
        """Flush caches that may contain entries of older weights; skips busy servers."""

        async def one(worker: ServerWorker) -> None:
            if worker.state.stale:
                with suppress(Refused):  # busy: flushed later
                    await self.send_flush(worker)
                    worker.state.flushed()

        await self.each(one)

    async def release(self, tags: Sequence[str]) -> None:
        """Release memory."""

        async def one(worker: ServerWorker) -> None:
            if to_send := worker.state.release(self.released_with(tags), live=0):
                try:
                    await self.send_release(worker, to_send)
                except AgentError:
                    # The server may not have received it, and resuming memory it holds would crash it.
                    worker.state.released.difference_update(to_send)
                    raise

        await self.each(one)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Reallocate memory."""

        async def one(worker: ServerWorker) -> None:
            if to_send := worker.state.resume_memory(tags):
                await self.send_resume_memory(worker, to_send)

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
            await self.send_flush(worker)
            state.flushed()
        if state.resume():
            await self.send_resume(worker)

    def agree(self, version: int | None, reported: dict[str, str]) -> int:
        """Return the version of the servers' weights; sets it on servers that report another name.

        Args:
            version: The version to set; default: the reported one, or 0.
            reported: The name of the version that each server reports, by address.
        """
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


def get_object(client: Client, path: str) -> dict[str, Any]:
    """Return the JSON object at a route that every server of this software has."""
    answer = client.ask(path)
    if not isinstance(answer, dict):
        raise UsageError(f"{client.url} is not {_article(client.name)} server: it has no {path}.")
    return answer


def positive_int(info: dict[str, Any], name: str) -> int | None:
    """Return a positive integer of a server's answer; ``None`` if it is not one."""
    value = info.get(name)
    return value if type(value) is int and value > 0 else None


def _article(name: str) -> str:
    return f"an {name}" if name == "SGLang" else f"a {name}"


def _set_weight_version(client: Client, version: int) -> None:
    try:
        client.ask("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
    except Refused as error:
        raise AgentError(f"{client.url} does not accept a weight version: {error}") from None
