"""vLLM's routes for generation, pausing and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from rollgym.core.errors import EngineLost, UsageError
from rollgym.engines.base import MEMORY_TAGS, GenerateRequest, Sampling
from rollgym.engines.servers.client import Client, Refused
from rollgym.engines.servers.reply import Piece, check_request
from rollgym.engines.servers.server_group import ServerGroup, ServerWorker, get_object, positive_int
from rollgym.engines.servers.server_state import ServerState
from rollgym.engines.vllm.compat import compat_of
from rollgym.engines.vllm.protocol import PREFIX, read, request_body
from rollgym.models.hf_files import ExpertShape


class VllmServers(ServerGroup):
    """One vLLM server."""

    software = "vLLM"

    def __init__(
        self,
        front: Client,
        workers: Sequence[ServerWorker],
        *,
        context: int,
        broadcasts: bool,
        on_cpu: bool,
        dtype: object = None,
        experts: ExpertShape | None = None,
    ) -> None:
        super().__init__(front, workers, context=context, dtype=dtype, experts=experts)
        self.broadcasts = broadcasts
        """Whether the server can receive tensors, by broadcast or in the call."""
        self.on_cpu = on_cpu
        """Whether the server runs on a CPU, where it pauses but releases nothing."""

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
        """Connect to the server at an address; returns the group and the version of its weights."""
        client = Client(url, name=cls.software, timeout=timeout, retries=retries, api_key=api_key)
        compat = compat_of(get_object(client, "/version").get("version"), client.url)
        facts = _describe(client)
        worker = ServerWorker(client, ServerState(compat), positive_int(facts, "world") or 1)
        context = positive_int(facts, "context") or 1
        servers = cls(
            client,
            [worker],
            context=context,
            broadcasts=facts.get("transfer") == "rollgym",
            on_cpu=facts.get("device") == "cpu",
            dtype=facts.get("dtype"),
            experts=experts if facts.get("routed_experts") is True else None,
        )
        servers.deltas = facts.get("deltas") is True
        reported = {client.url: str(get_object(client, "/weight_info").get("weight_version"))}
        return servers, servers.agree(version, reported)

    def check(self, request: GenerateRequest, vocabulary: int) -> int:
        """Return the maximum number of tokens of a reply, or raise `BadRequest`."""
        return check_request(request, vocabulary, self.context)

    def request_body(
        self, rid: str, ids: Sequence[int], sampling: Sampling, max_tokens: int, position: int
    ) -> dict[str, Any]:
        """Build the body of a call for the rest of a reply."""
        return request_body(rid, ids, sampling, max_tokens, position)

    async def generate(self, body: dict[str, Any], limit: int, session: str) -> bytes:
        """Send a generation request; an internal error means that the model's process is gone."""
        headers = {"X-Session-ID": session} if session.isascii() and session.isprintable() else {}
        try:
            return await self.front.generate("/inference/v1/generate", body, limit, headers)
        except Refused as error:
            if error.status >= 500:
                raise EngineLost(str(error)) from None
            raise

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
        await worker.client.post(f"/pause?mode={mode}", {})

    async def send_resume(self, worker: ServerWorker) -> None:
        """Continue a paused server."""
        await worker.client.post("/resume", {})

    async def send_abort(self, worker: ServerWorker, rid: str | None) -> None:
        """Abort one request of a server, or all."""
        body: dict[str, Any] = {} if rid is None else {"request_ids": [PREFIX + rid]}
        await worker.client.post("/abort_requests", body)

    async def send_flush(self, worker: ServerWorker) -> None:
        """Drop a server's prefix cache; replies that wait are computed again."""
        await worker.client.post("/reset_prefix_cache?reset_running_requests=true", {})

    async def weight_version(self, worker: ServerWorker) -> object:
        """Return the name of the version of a server's weights, as it reports it."""
        answer = await worker.client.get("/weight_info")
        return answer.get("weight_version") if isinstance(answer, dict) else None

    def released_with(self, tags: Sequence[str]) -> Sequence[str]:
        """Return the memory that is released: a server that releases its weights drops its cache, too."""
        return MEMORY_TAGS if "weights" in tags else tags

    async def send_release(self, worker: ServerWorker, tags: Sequence[str]) -> None:
        """Release memory of a paused, idle server."""
        if "weights" in tags:
            await worker.client.post("/sleep?level=2&mode=abort", {})
        elif not self.on_cpu:  # refused there: the server keeps its cache and only pauses
            await worker.client.post("/release_kv_cache_memory", {})

    async def send_resume_memory(self, worker: ServerWorker, tags: Sequence[str]) -> None:
        """Reallocate memory of a server; it resumes by itself once it has all, so it is paused again."""
        await worker.client.post("/wake_up?" + "&".join(f"tags={tag}" for tag in tags), {})
        if not worker.state.released:
            await worker.client.post("/pause?mode=abort", {})


def _describe(client: Client) -> dict[str, Any]:
    """Return facts about a server; raises `UsageError` if its log-probs or weights would be wrong."""
    facts: Any = None
    with suppress(Refused):
        answer = client.ask("/collective_rpc", {"method": "rollgym_describe"})
        facts = answer["results"][0] if isinstance(answer, dict) and answer.get("results") else None
    if not isinstance(facts, dict):
        raise UsageError(
            f"The vLLM server at {client.url} lacks rollgym's worker extension: start it with "
            "VLLM_SERVER_DEV_MODE=1 and the arguments in docs/vllm.md, or let rollgym start it."
        )
    if facts.get("logprobs_mode") != "processed_logprobs":
        raise UsageError(
            f"The vLLM server at {client.url} reports log-probs that were not sampled with: start it with "
            "--logprobs-mode processed_logprobs."
        )
    if facts.get("packed"):
        raise UsageError(
            f"The vLLM server at {client.url} packs its weights for the CPU's kernels, so they could not be "
            "replaced: start it with rollgym's worker extension."
        )
    return facts
