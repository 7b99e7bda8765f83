"""Test doubles: an engine with scripted replies, for tests of agents and trainers without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby

from rollgym.core.errors import AgentError
from rollgym.engines.base import (
    BadRequest,
    Engine,
    FinishReason,
    GenerateRequest,
    Generation,
    OnToken,
    WeightSource,
)

Script = Callable[[GenerateRequest], Sequence[int]]
"""Maps a request to the token ids of its reply."""


class ScriptedEngine(Engine):
    """An `Engine` whose replies come from a function of the request.

    Apart from the model it behaves like a real engine: it stops at a stop id, at ``max_tokens`` and at the
    end of the context, rejects a prompt that does not fit, reports the weight version of each token, waits
    while it is paused, and stops at once when a call is cancelled or aborted::

        engine = ScriptedEngine(lambda request: tokenizer.encode("Up") + [request.sampling.stop_ids[0]])

    Args:
        script: Maps a request to the ids of its reply; a list is the reply to every request.
        context_length: Maximum number of tokens of prompt and reply together.
        delay: Seconds per token.
        logprob: Log-prob reported for each token.
        version: Initial version of the weights; `update_weights` changes it.
    """

    def __init__(
        self,
        script: Script | Sequence[int],
        *,
        context_length: int = 4096,
        delay: float = 0.0,
        logprob: float = -0.5,
        version: int = 0,
    ) -> None:
        self._script: Script = script if callable(script) else lambda request: script
        self._delay = delay
        self._logprob = logprob
        self._running = asyncio.Event()
        self._running.set()
        self._abort: set[str] = set()
        self._version = version
        self._context_length = context_length
        self.closed = False
        self.requests: list[GenerateRequest] = []
        """All requests received, in order."""
        self.active: set[str] = set()
        """Ids of the requests in flight."""
        self.cancelled: list[str] = []
        """Ids of the requests whose caller was cancelled."""
        self.forgotten: list[str] = []
        """Sessions that were forgotten."""
        self.weights: list[WeightSource] = []
        """All weights received, in order."""

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self._version

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and reply together."""
        return self._context_length

    async def generate(self, request: GenerateRequest) -> Generation:
        """Reply with the script's ids."""
        return await self._generate(request, None)

    async def stream(self, request: GenerateRequest, on_token: OnToken) -> Generation:
        """Reply with the script's ids, one by one."""
        return await self._generate(request, on_token)

    async def _generate(self, request: GenerateRequest, on_token: OnToken | None) -> Generation:
        self.requests.append(request)
        self._check(request)
        self.active.add(request.request_id)
        try:
            return await self._reply(request, on_token)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.active.discard(request.request_id)
            self._abort.discard(request.request_id)

    def _check(self, request: GenerateRequest) -> None:
        if self.closed:
            raise AgentError("The engine is closed.")
        if request.request_id in self.active:
            raise BadRequest(f"Request id {request.request_id!r} is already in use.")
        if not request.prompt_ids:
            raise BadRequest("The request has no prompt ids.")
        if len(request.prompt_ids) >= self._context_length:
            raise BadRequest(f"A prompt of {len(request.prompt_ids)} ids leaves no room for a reply.")

    async def _reply(self, request: GenerateRequest, on_token: OnToken | None) -> Generation:
        sampling = request.sampling
        ids: list[int] = []
        versions: list[int] = []
        reason: FinishReason = "length"
        room = min(sampling.max_tokens, self._context_length - len(request.prompt_ids))
        for token in list(self._script(request))[:room]:
            await self._running.wait()
            await asyncio.sleep(self._delay)
            if self.closed:
                raise AgentError("The engine was closed.")
            if request.request_id in self._abort:
                reason = "aborted"
                break
            ids.append(token)
            versions.append(self._version)
            if on_token is not None:
                on_token(token)
            if token in sampling.stop_ids:
                reason = "stop"
                break
        return Generation(
            token_ids=tuple(ids),
            logprobs=(self._logprob,) * len(ids),
            finish_reason=reason,
            version_spans=tuple((version, len(list(run))) for version, run in groupby(versions)),
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these replies at their next token."""
        self._abort.update(self.active.intersection(request_ids))

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Record the weights, and report their version from the next token on."""
        self.weights.append(weights)
        self._version = version

    async def pause(self) -> None:
        """Stop generating until `resume`."""
        self._running.clear()

    async def resume(self) -> None:
        """Continue."""
        self._running.set()

    async def forget(self, session: str) -> None:
        """Record that a session has ended."""
        self.forgotten.append(session)

    async def close(self) -> None:
        """Stop, and fail all pending requests."""
        self.closed = True
        self._running.set()
