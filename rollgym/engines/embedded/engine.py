"""The embedded engine: a transformers model in this process, on CPU or CUDA.

    engine = EmbeddedEngine("path/to/model")
    reply = await engine.generate(GenerateRequest(request_id="1", prompt_ids=(1, 2, 3), session="episode-1"))

Concurrent calls of `generate` share the model by continuous batching: each forward pass computes the next
token of all of them. Prefixes are shared across requests and sessions (`PrefixCache`). On CPU, generation is
batch invariant: a reply depends only on its prompt, seed and weights, bit for bit (docs/engines.md).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from rollgym.core.errors import AgentError, UsageError
from rollgym.devices.torch_device import torch_device
from rollgym.engines.base import (
    MEMORY_TAGS,
    BadRequest,
    Engine,
    EngineStats,
    GenerateRequest,
    Generation,
    OnToken,
    WeightSource,
)
from rollgym.engines.embedded.batch_invariance import make_batch_invariant
from rollgym.engines.embedded.engine_thread import EngineThread, in_loop, settle
from rollgym.engines.embedded.kv_cache import round_up
from rollgym.engines.embedded.model import Model, read_tensors
from rollgym.engines.embedded.offload import trim_memory
from rollgym.engines.embedded.precision import dtype_name
from rollgym.engines.embedded.scheduler import LENGTH_STEP, BatchScheduler
from rollgym.engines.embedded.sequence import SequenceState

__all__ = ["EmbeddedEngine"]

_CACHE_TOKENS = 131_072
_CHUNK_WORK = 1_000_000_000
"""Default prefill budget of a pass: parameters times prompt tokens."""
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_RELEASED = "The engine's weights were released: call update_weights before wake_up or resume."
_PARTIAL = "A weight update failed halfway, so the engine has mixed weights: send all weights again."
_LARGE = 300_000_000
"""Models with packed weights and fewer parameters prefill at least 256 tokens per pass, others 128."""
_SINGLE_THREAD = 2_000_000
"""Models with fewer parameters run on one thread: synchronizing a second one costs more than it gains."""


class EmbeddedEngine(Engine):
    """An `Engine` that runs a transformers model in this process.

    Args:
        model: A transformers causal language model (copied, never shared) or a folder with one.
        device: Default: CUDA if available, else CPU.
        dtype: A dtype or its name. Default: bfloat16 on CUDA, float32 on CPU. ``auto``: on CPU, bfloat16 for
            a model of at least 20 million parameters if a measurement shows that this CPU is fast at it.
        max_batch: Maximum number of replies generated concurrently; more wait.
        cache_tokens: Size limit of the KV cache in tokens. Default: 131,072, or twice the context.
        prefill_chunk: Prompt tokens per pass, beside one token of each reply. Default: 128 to 1,024, fewer
            for larger models, so that a long prompt does not stall other replies.
        threads: CPU threads of the model. Default: 1 for a small model, else the setting of torch.
        deterministic: Batch-invariant generation. Default: True on CPU, False on CUDA.
        context_length: Maximum context, if less than the model supports.
        return_routed_experts: Record the experts that the routers of a mixture-of-experts model choose, and
            report them in `Generation.routed_experts`. Models without experts report none.
        version: Version of the given weights.
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | Literal["auto", "float32", "bfloat16", "float16"] | None = None,
        max_batch: int = 64,
        cache_tokens: int | None = None,
        prefill_chunk: int | None = None,
        threads: int | None = None,
        deterministic: bool | None = None,
        context_length: int | None = None,
        return_routed_experts: bool = False,
        version: int = 0,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("prefill_chunk", prefill_chunk), ("threads", threads)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}.")
        on = torch_device(str(device) if device is not None else None)
        if isinstance(dtype, str) and dtype not in _DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}.")
        self.deterministic = on.type == "cpu" if deterministic is None else deterministic

        default_threads = torch.get_num_threads()

        def make() -> BatchScheduler:  # in the engine's thread: torch's thread count is per calling thread
            torch.set_num_threads(threads or default_threads)
            copied = Model(model, device=on, dtype=dtype, context=context_length)
            if threads is None and copied.parameters < _SINGLE_THREAD:
                torch.set_num_threads(1)
            chunk = prefill_chunk or _default_chunk(copied)
            if self.deterministic:
                make_batch_invariant(copied, most_rows=min(chunk, 256))
            if return_routed_experts:
                copied.record_experts()
            least = round_up(copied.rule.cache_length(copied.context), LENGTH_STEP)
            limit = _cache_limit(cache_tokens, copied.context, least)
            scheduler = BatchScheduler(copied, max_batch=max_batch, cache_tokens=limit, prefill_chunk=chunk)
            scheduler.version = version
            return scheduler

        self._thread = EngineThread(make)
        self._scheduler = self._thread.start()
        self._model = self._scheduler.model
        self._mixed_weights = False
        """True after a weight update that failed halfway."""

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self._scheduler.version

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and reply together."""
        return self._model.context

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary: valid ids are 0 to ``vocabulary - 1``."""
        return self._model.vocabulary

    @property
    def dtype(self) -> str:
        """The dtype of weights, activations and KV cache, such as ``float32``."""
        return dtype_name(self._model.shape.dtype)

    @property
    def weight_dtype(self) -> str:
        """The dtype of the weights."""
        return self.dtype

    @property
    def fused(self) -> bool:
        """True if the model runs on `FusedDecoder` instead of its transformers module."""
        return self._model.fused

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply. A cancelled call stops generating at once."""
        return await self._generate(request, None)

    async def stream(self, request: GenerateRequest, on_token: OnToken) -> Generation:
        """Sample one reply as `generate` does, and pass on its tokens as they are sampled."""
        return await self._generate(request, in_loop(on_token))

    async def _generate(self, request: GenerateRequest, on_token: OnToken | None) -> Generation:
        limit = self._check(request)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        sequence = SequenceState(request, limit, settle(future), on_token)
        self._thread.post(lambda scheduler: scheduler.submit(sequence))
        try:
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(AgentError):  # closed: it has stopped already
                self._thread.post(lambda scheduler: scheduler.abort([sequence]))
            raise

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these replies now; each returns its tokens so far as ``aborted``. Ignores unknown ids."""
        ids = frozenset(request_ids)
        await self._thread.call(lambda scheduler: scheduler.abort(scheduler.find(ids)))

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Use new weights from the next token on; drop the KV cache of the old ones.

        Buckets are copied as they arrive. If that fails halfway, generating fails until a complete update.
        """
        if (buckets := weights.buckets) is not None:
            await self._thread.call(lambda scheduler: self._load_buckets(scheduler, version, buckets()))
            return
        tensors: Mapping[str, Any] = weights.tensors or {}
        if weights.path is not None:
            tensors = await asyncio.to_thread(read_tensors, weights.path, self._model.shape.dtype)
        self._model.check(tensors)
        await self._thread.call(lambda scheduler: scheduler.load_weights(version, tensors))
        self._mixed_weights = False

    async def pause(self) -> None:
        """Stop generating until `resume`; requests wait."""
        await self._thread.pause(True)

    async def resume(self) -> None:
        """Continue. Released weights must have been replaced by `update_weights`."""
        if self._model.weight_storage.released:
            raise AgentError(_RELEASED)
        await self._thread.pause(False)

    async def sleep(self, tags: Sequence[str] = MEMORY_TAGS, *, replicas: Sequence[int] | None = None) -> int:
        """Pause and free memory; running replies keep their tokens and wait. Returns bytes freed.

        async def forget(self, session: str) -> None:
            The next `update_weights` reallocates the memory of the weights.
        """
        await self._thread.pause(True)
        return await self._thread.call(lambda scheduler: _free(scheduler, tags))

    async def forget(self, session: str) -> None:
        """Drop the reference of a session that has ended to its KV cache, which others may share."""
        await self._thread.call(lambda scheduler: scheduler.forget(session))

    async def close(self) -> None:
        """Stop, and fail all pending requests."""
        await self._thread.close()

    async def stats(self) -> EngineStats:
        """Counters and memory, read between two passes."""
        return await self._thread.call(_stats)

    def _load_buckets(
        self, scheduler: BatchScheduler, version: int, buckets: Iterable[Sequence[tuple[str, Any]]]
    ) -> None:
        """Copy weights bucket by bucket, in the engine's thread."""
        parameters = dict(self._model.module.named_parameters())
        missing = set(parameters)
        # Ranks may gather the buckets from tensors that training uses later: no inference tensors here.
        with torch.inference_mode(False):
            try:
                for bucket in buckets:
                    tensors = dict(bucket)
                    self._model.check(parameters | tensors)
                    self._mixed_weights = True
                    scheduler.invalidate_cache()
                    scheduler.model.load(tensors)
                    missing -= tensors.keys()
                if missing:
                    raise UsageError(f"The new weights lack {', '.join(sorted(missing)[:3])}.")
            except BaseException:
                if self._mixed_weights:
                    scheduler.fail(AgentError(_PARTIAL), (*scheduler.running, *scheduler.waiting))
                raise
        scheduler.version = version
        self._mixed_weights = False

    def _check(self, request: GenerateRequest) -> int:
        """Return the maximum number of tokens of the reply, or raise `BadRequest`."""
        if self._mixed_weights:
            raise AgentError(_PARTIAL)
        ids, context = request.prompt_ids, self._model.context
        if not ids:
            raise BadRequest(f"Request {request.request_id!r} has no prompt ids.")
        for token in ids:
            if type(token) is not int or not 0 <= token < self._model.vocabulary:
                raise BadRequest(
                    f"Request {request.request_id!r} has the prompt id {token!r}; "
                    f"ids must be integers from 0 to {self._model.vocabulary - 1}."
                )
        if len(ids) >= context:
            raise BadRequest(
                f"Request {request.request_id!r} has {len(ids)} prompt ids; the context of {context} "
                "leaves no room for a reply."
            )
        return min(request.sampling.max_tokens, context - len(ids))


def _default_chunk(model: Model) -> int:
    least = 256 if model.packed and model.parameters < _LARGE else 128
    return min(1024, max(least, _CHUNK_WORK // model.parameters))


def _cache_limit(requested: int | None, context: int, least: int) -> int:
    if requested is None:
        return max(_CACHE_TOKENS, 2 * least)
    if requested < least:
        raise UsageError(
            f"cache_tokens={requested} cannot hold one conversation: the context is {context} tokens, so at "
            f"least {least} are needed (or a smaller context_length)."
        )
    return requested


def _stats(scheduler: BatchScheduler) -> EngineStats:
    counts = scheduler.counts
    return EngineStats(
        passes=counts.passes,
        computed_tokens=counts.computed,
        prefix_hit_tokens=counts.prefix_hits,
        reused_tokens=counts.reused,
        evicted_tokens=scheduler.prefixes.evicted_tokens,
        evicted_sessions=scheduler.prefixes.evicted_sessions,
        preempted=counts.preempted,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        sessions=scheduler.prefixes.sessions,
        cached_tokens=scheduler.tokens,
        cache_bytes=scheduler.tokens * scheduler.model.shape.token_bytes,
        weight_bytes=scheduler.model.weight_bytes,
    )


def _free(scheduler: BatchScheduler, tags: Sequence[str]) -> int:
    before = _stats(scheduler)
    if "kv_cache" in tags:
        scheduler.free_cache()
    if "weights" in tags:
        scheduler.model.release_weights()
    if tags:
        trim_memory(scheduler.model.device)
    after = _stats(scheduler)
    return before.cache_bytes + before.weight_bytes - after.cache_bytes - after.weight_bytes
