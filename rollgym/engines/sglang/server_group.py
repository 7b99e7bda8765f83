"""SGLang's routes: one server, or sglang-router with its workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

from rollgym.core.errors import AgentError, UsageError
from rollgym.engines.base import GenerateRequest, Sampling
from rollgym.engines.servers.client import Client
from rollgym.engines.servers.reply import Piece, check_request
from rollgym.engines.servers.server_group import ServerGroup, ServerWorker, get_object, positive_int
from rollgym.engines.servers.server_state import ServerState
from rollgym.engines.sglang.compat import SglangCompat, compat_of
from rollgym.engines.sglang.protocol import check_filters, read, request_body
from rollgym.engines.sglang.server import LOADER
from rollgym.models.hf_files import ExpertShape

log = logging.getLogger(__name__)


class SglangServers(ServerGroup):
    """SGLang servers behind one address."""

    software = "SGLang"

    def __init__(
        self,
        front: Client,
        workers: Sequence[ServerWorker],
        *,
        context: int,
        seeded: bool,
        dtype: object = None,
        experts: ExpertShape | None = None,
    ) -> None:
        super().__init__(front, workers, context=context, dtype=dtype, experts=experts)
        self.seeded = seeded
        """Whether the servers sample with the request's seed."""

    @property
    def compat(self) -> SglangCompat:
        """Features that all servers support."""
        return min(
            (cast(SglangCompat, worker.state.compat) for worker in self.workers), key=lambda one: one.version
        )

    @classmethod
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
        """Connect to the servers at an address; returns the group and the version of their weights."""

        def client(address: str) -> Client:
            return Client(address, name=cls.software, timeout=timeout, retries=retries, api_key=api_key)

        front = client(url)
        clients = [client(one) for one in _addresses(front)]
        infos = [get_object(one, "/server_info") for one in clients]
        workers = [
            ServerWorker(
                one,
                ServerState(compat_of(info.get("version"), one.url)),
                positive_int(info, "tp_size") or 1,
            )
            for one, info in zip(clients, infos, strict=True)
        ]
        context = min(_context(one, info) for one, info in zip(clients, infos, strict=True))
        seeded = all(info.get("enable_deterministic_inference") is True for info in infos)
        dtypes = {str(info.get("dtype")) for info in infos}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        if not all(info.get("enable_return_routed_experts") is True for info in infos):
            experts = None
        servers = cls(front, workers, context=context, seeded=seeded, dtype=dtype, experts=experts)
        servers.deltas = all(LOADER in (info.get("custom_weight_loader") or ()) for info in infos)
        if not servers.compat.tested:
            log.warning("%s runs an SGLang version that rollgym was not tested with.", url)
        reported = {one.url: str(get_object(one, "/model_info").get("weight_version")) for one in clients}
        return servers, servers.agree(version, reported)

    def check(self, request: GenerateRequest, vocabulary: int) -> int:
        """Return the maximum number of tokens of a reply, or raise `BadRequest`."""
        room = check_request(request, vocabulary, self.context)
        check_filters(request)
        return room

    def request_body(
        self, rid: str, ids: Sequence[int], sampling: Sampling, max_tokens: int, position: int
    ) -> dict[str, Any]:
        """Build the body of a call for the rest of a reply."""
        return request_body(rid, ids, sampling, max_tokens, self.seeded, self.experts is not None)

    async def generate(self, body: dict[str, Any], limit: int, session: str) -> bytes:
        """Send a generation request; the session is the routing key of a router."""
        headers = {"X-SMG-Routing-Key": session} if session.isascii() and session.isprintable() else {}
        return await self.front.generate("/generate", body, limit, headers)

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
        """Parse and validate the answer to a generation request."""
        where, experts = self.front.url, self.experts
        return read(answer, rid, prompt, sampling, max_tokens, vocabulary, number, where, experts)

    async def send_pause(self, worker: ServerWorker, mode: str) -> None:
        """Pause a server."""
        await worker.client.post("/pause_generation", {"mode": mode})

    async def send_resume(self, worker: ServerWorker) -> None:
        """Continue a paused server."""
        await worker.client.post("/continue_generation", {})

    async def send_abort(self, worker: ServerWorker, rid: str | None) -> None:
        """Abort one request of a server, or all."""
        what: dict[str, Any] = {"abort_all": True, "rid": ""} if rid is None else {"rid": rid}
        await worker.client.post("/abort_request", what)

    async def send_flush(self, worker: ServerWorker) -> None:
        """Drop a server's prefix cache."""
        await worker.client.post("/flush_cache", {})

    async def weight_version(self, worker: ServerWorker) -> object:
        """Return the name of the version of a server's weights, as it reports it."""
        answer = await worker.client.get("/model_info")
        return answer.get("weight_version") if isinstance(answer, dict) else None

    async def send_release(self, worker: ServerWorker, tags: Sequence[str]) -> None:
        """Release memory of a paused, idle server."""
        await worker.client.post("/release_memory_occupation", {"tags": list(tags)})

    async def send_resume_memory(self, worker: ServerWorker, tags: Sequence[str]) -> None:
        """Reallocate memory of a server."""
        await worker.client.post("/resume_memory_occupation", {"tags": list(tags)})


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


def _context(client: Client, info: dict[str, Any]) -> int:
    """Return the maximum prompt length; a server generates at most a few tokens beyond it."""
    length = positive_int(info, "max_req_input_len")
    if length is None:
        raise AgentError(f"{client.url} does not report max_req_input_len, the maximum prompt length.")
    return length
