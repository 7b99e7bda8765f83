"""The embedded engine: a transformers model in this process, on CPU or CUDA.

    engine = TorchEngine("path/to/model")
    reply = await engine.generate(GenerateRequest(request_id="1", prompt_ids=(1, 2, 3), session="episode-1"))

Many calls of `generate` share the model: each pass computes the next token of all of them. What a session
has computed is kept for its next turn. On CPU a reply depends on its prompt, seed and weights alone, bit
for bit, whatever else is being generated (docs/engine.md).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollgym.devices.choose import torch_device
from rollgym.engines import BadRequest, GenerateRequest, Generation, WeightSource
from rollgym.engines.embedded.batcher import LENGTH_GRAIN, Batcher
from rollgym.engines.embedded.cache import round_up
from rollgym.engines.embedded.memory import return_freed
from rollgym.engines.embedded.model import Model, read_tensors
from rollgym.engines.embedded.probe import make_exact
from rollgym.engines.embedded.run import Run
from rollgym.engines.embedded.worker import Worker, settle
from rollgym.errors import AgentError, UsageError

__all__ = ["EngineStats", "TorchEngine"]

_CACHE_TOKENS = 131_072
_CHUNK_WORK = 1_000_000_000
"""Parameters times prompt tokens of a pass."""
_GONE = "The engine has given up the memory of its weights: send new ones before it goes on."
_HALF = "The engine's weights are half new and half old: an update failed. Send all of them again."
_SMALL = 2_000_000
"""Below so many parameters, a second thread gains less than waiting for it costs on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the engine has done and holds."""

    passes: int
    computed_tokens: int
    """Tokens that went through the model: those of prompts that were not kept, and those sampled."""
    evicted_sessions: int
    set_back: int
    """Replies that had to make room in the middle and were computed again."""
    running: int
    waiting: int
    sessions: int
    cached_tokens: int
    """Tokens that memory is held for; never more than ``cache_tokens``."""
    cache_bytes: int
    """Of their keys and values."""
    weight_bytes: int
    """Of the weights; 0 while their memory is given up."""


class TorchEngine:
    """An `Engine` in this process.

    Args:
        model: a transformers causal language model (copied, never shared) or a folder with one.
        device: default CUDA where there is one, else CPU.
        dtype: default bfloat16 on CUDA, float32 on CPU.
        max_batch: how many replies are generated at once; more wait.
        cache_tokens: bound on all keys and values held, in tokens. Default 131,072, or twice the context.
        prefill_chunk: how many prompt tokens a pass computes beside one token of each reply. Default: 128 to
            1,024, fewer for larger models, so that a prompt does not hold up other replies for long.
        threads: CPU threads for the model. Default: one for a small model, else what torch is set to.
        deterministic: a reply's bits depend on nothing but its request. Default: on CPU yes, on CUDA no.
        context_length: less than the model's own, where long positions are not needed.
        version: of the weights given.
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        max_batch: int = 64,
        cache_tokens: int | None = None,
        prefill_chunk: int | None = None,
        threads: int | None = None,
        deterministic: bool | None = None,
        context_length: int | None = None,
        version: int = 0,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("prefill_chunk", prefill_chunk), ("threads", threads)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}.")
        place = torch_device(str(device) if device is not None else None)
        precision = dtype or (torch.float32 if place.type == "cpu" else torch.bfloat16)
        self.deterministic = place.type == "cpu" if deterministic is None else deterministic

        usual = torch.get_num_threads()

        def make() -> Batcher:  # in the worker's thread: torch counts threads for each of its callers
            torch.set_num_threads(threads or usual)
            own = Model(model, device=place, dtype=precision, context=context_length)
            if threads is None and own.parameters < _SMALL:
                torch.set_num_threads(1)
            chunk = prefill_chunk or min(1024, max(128, _CHUNK_WORK // own.parameters))
            if self.deterministic:
                make_exact(own, most_rows=min(chunk, 256))
            bound = _bound(cache_tokens, own.context, round_up(own.rule.length(own.context), LENGTH_GRAIN))
            made = Batcher(own, max_batch=max_batch, cache_tokens=bound, prefill_chunk=chunk)
            made.version = version
            return made

        self._worker = Worker(make)
        self._batcher = self._worker.start()
        self._model = self._batcher.model
        self._torn = False
        """True where some of the weights are new and some are old."""

    @property
    def version(self) -> int:
        """Of the weights in use."""
        return self._batcher.version

    @property
    def context_length(self) -> int:
        """The longest prompt and reply together."""
        return self._model.context

    @property
    def vocabulary(self) -> int:
        """How many token ids the model knows, from 0."""
        return self._model.vocabulary

    @property
    def lean(self) -> bool:
        """True where the model runs without the overhead of its transformers module."""
        return self._model.lean

    async def generate(self, request: GenerateRequest) -> Generation:
        """Draw one reply. A cancelled call stops generating at once. `BadRequest` where it cannot."""
        limit = self._check(request)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        run = Run(request, limit, settle(future))
        self._worker.post(lambda batcher: batcher.submit(run))
        try:
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(AgentError):  # closed: it has stopped already
                self._worker.post(lambda batcher: batcher.abort([run]))
            raise

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these replies now; each returns what it has, as ``aborted``. Unknown ids are ignored."""
        ids = frozenset(request_ids)
        await self._worker.ask(lambda batcher: batcher.abort(batcher.find(ids)))

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Use new weights from the next token on; nothing computed with the old ones is used again.

        Buckets are copied as they come. Where that fails in the middle, nothing is generated until whole
        weights have come.
        """
        if (buckets := weights.buckets) is not None:
            await self._worker.ask(lambda batcher: self._take(batcher, version, buckets()))
            return
        tensors: Mapping[str, Any] = weights.tensors or {}
        if weights.path is not None:
            tensors = await asyncio.to_thread(read_tensors, weights.path, self._model.shape.dtype)
        self._model.check(tensors)
        await self._worker.ask(lambda batcher: batcher.swap(version, tensors))
        self._torn = False

    async def pause(self) -> None:
        """Generate nothing until `resume`; requests wait."""
        await self._worker.pause(True)

    async def resume(self) -> None:
        """Go on. Weights whose memory was given up must have come anew."""
        if self._model.blocks.given_up:
            raise AgentError(_GONE)
        await self._worker.pause(False)

    async def release(self, *, weights: bool = True) -> int:
        """Pause, and give up the memory of keys and values and, unless told otherwise, of the weights.

        Replies under way keep their tokens and wait. New weights take their memory back as they come. Returns
        the bytes that were given up.
        """
        await self._worker.pause(True)
        return await self._worker.ask(lambda batcher: _release(batcher, weights))

    async def forget(self, session: str) -> None:
        """Drop what is kept for a session that has ended."""
        await self._worker.ask(lambda batcher: batcher.forget(session))

    async def close(self) -> None:
        """Stop, and fail what still waits."""
        await self._worker.close()

    async def stats(self) -> EngineStats:
        """What the engine has done and holds, between two passes."""
        return await self._worker.ask(_stats)

    def _take(self, batcher: Batcher, version: int, buckets: Iterable[Sequence[tuple[str, Any]]]) -> None:
        """Copy weights that come some at a time; the thread that calls this computes nothing meanwhile."""
        own = dict(self._model.module.named_parameters())
        missing = set(own)
        # Other processes may have a part in gathering them, with tensors that are used in training again.
        with torch.inference_mode(False):
            try:
                for bucket in buckets:
                    tensors = dict(bucket)
                    self._model.check(own | tensors)
                    self._torn = True
                    batcher.drop_computed()
                    batcher.model.load(tensors)
                    missing -= tensors.keys()
                if missing:
                    raise UsageError(f"The new weights lack {', '.join(sorted(missing)[:3])}.")
            except BaseException:
                if self._torn:
                    batcher.fail(AgentError(_HALF), (*batcher.running, *batcher.waiting))
                raise
        batcher.version = version
        self._torn = False

    def _check(self, request: GenerateRequest) -> int:
        """How many tokens the reply may have."""
        if self._torn:
            raise AgentError(_HALF)
        ids, context = request.prompt_ids, self._model.context
        if not ids:
            raise BadRequest(f"Request {request.request_id!r} has no prompt ids.")
        for token in ids:
            if type(token) is not int or not 0 <= token < self._model.vocabulary:
                raise BadRequest(
                    f"Request {request.request_id!r} has the prompt id {token!r}; "
                    f"ids are whole numbers from 0 to {self._model.vocabulary - 1}."
                )
        if len(ids) >= context:
            raise BadRequest(
                f"Request {request.request_id!r} has {len(ids)} prompt ids; the context of {context} "
                "leaves no room for a reply."
            )
        return min(request.sampling.max_tokens, context - len(ids))


def _bound(asked: int | None, context: int, least: int) -> int:
    if asked is None:
        return max(_CACHE_TOKENS, 2 * least)
    if asked < least:
        raise UsageError(
            f"cache_tokens={asked} cannot hold one conversation: the context is {context} tokens, so at "
            f"least {least} are needed (or a smaller context_length)."
        )
    return asked


def _stats(batcher: Batcher) -> EngineStats:
    counts = batcher.counts
    return EngineStats(
        passes=counts.passes,
        computed_tokens=counts.computed,
        evicted_sessions=counts.evicted,
        set_back=counts.set_back,
        running=len(batcher.running),
        waiting=len(batcher.waiting),
        sessions=len(batcher.sessions),
        cached_tokens=batcher.tokens,
        cache_bytes=batcher.tokens * batcher.model.shape.token_bytes,
        weight_bytes=batcher.model.blocks.held,
    )


def _release(batcher: Batcher, weights: bool) -> int:
    before = _stats(batcher)
    batcher.empty_cache()
    if weights:
        batcher.model.blocks.give_up()
    return_freed(batcher.model.device)
    return before.cache_bytes + before.weight_bytes - batcher.model.blocks.held
