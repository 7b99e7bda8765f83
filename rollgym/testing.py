"""What tests of agents and trainers need and no model: an engine that says what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import groupby

from rollgym.engines import BadRequest, FinishReason, GenerateRequest, Generation, WeightSource
from rollgym.errors import AgentError

Script = Callable[[GenerateRequest], Sequence[int]]
"""The ids to answer a request with."""


class ScriptedEngine:
    """An `Engine` whose replies come from a function of the request.

    It behaves like a real one in all that does not need a model: it stops at a stop id, at ``max_tokens``
    and at the end of the context, refuses a prompt that does not fit, reports the version that was in use
    at each token, waits while it is paused, and stops at once when a call is cancelled or aborted::

        engine = ScriptedEngine(lambda request: tokenizer.encode("Up") + [request.sampling.stop_ids[0]])

    Args:
        script: The ids to answer a request with; a list answers every request alike.
        context_length: The longest prompt and reply together.
        delay: Seconds for each token.
        logprob: What is reported for each token.
        version: Of the weights, to begin with; `update_weights` changes it.
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
        self._going = asyncio.Event()
        self._going.set()
        self._abort: set[str] = set()
        self._version = version
        self._context_length = context_length
        self.closed = False
        self.requests: list[GenerateRequest] = []
        """Every request that came, in order."""
        self.active: set[str] = set()
        """Ids of the requests under way."""
        self.cancelled: list[str] = []
        """Ids of the requests whose caller was cancelled."""
        self.forgotten: list[str] = []
        """Sessions that were forgotten."""
        self.weights: list[WeightSource] = []
        """The weights that came, in order."""

    @property
    def version(self) -> int:
        """Of the weights in use."""
        return self._version

    @property
    def context_length(self) -> int:
        """The longest prompt and reply together."""
        return self._context_length

    async def generate(self, request: GenerateRequest) -> Generation:
        """Answer as the script says."""
        self.requests.append(request)
        self._check(request)
        self.active.add(request.request_id)
        try:
            return await self._speak(request)
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
            raise BadRequest(f"There is a request {request.request_id!r} already.")
        if not request.prompt_ids:
            raise BadRequest("A request needs a prompt.")
        if len(request.prompt_ids) >= self._context_length:
            raise BadRequest(f"A prompt of {len(request.prompt_ids)} ids leaves no room for a reply.")

    async def _speak(self, request: GenerateRequest) -> Generation:
        sampling = request.sampling
        ids: list[int] = []
        versions: list[int] = []
        reason: FinishReason = "length"
        room = min(sampling.max_tokens, self._context_length - len(request.prompt_ids))
        for number in list(self._script(request))[:room]:
            await self._going.wait()
            await asyncio.sleep(self._delay)
            if self.closed:
                raise AgentError("The engine was closed.")
            if request.request_id in self._abort:
                reason = "aborted"
                break
            ids.append(number)
            versions.append(self._version)
            if number in sampling.stop_ids:
                reason = "stop"
                break
        return Generation(
            token_ids=tuple(ids),
            logprobs=(self._logprob,) * len(ids),
            finish_reason=reason,
            version_spans=tuple((version, len(list(run))) for version, run in groupby(versions)),
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these replies at their next token."""
        self._abort.update(self.active.intersection(request_ids))

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Note the weights, and report their version from the next token on."""
        self.weights.append(weights)
        self._version = version

    async def pause(self) -> None:
        """Say nothing until `resume`."""
        self._going.clear()

    async def resume(self) -> None:
        """Go on."""
        self._going.set()

    async def forget(self, session: str) -> None:
        """Note that a session has ended."""
        self.forgotten.append(session)

    async def close(self) -> None:
        """Stop, and fail what still waits."""
        self.closed = True
        self._going.set()
