"""The engine protocol: prompt token ids in, sampled token ids with their log-probs out.

An engine receives the ids of a whole conversation and samples the next ones; it never sees text. It reports
the sampled ids, the log-prob of each under the distribution it was sampled from (after temperature, top-p,
top-k and min-p), and the version of the weights behind each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rollgym.core.errors import AgentError, UsageError
from rollgym.core.routed_experts import RoutedExperts

__all__ = [
    "MEMORY_TAGS",
    "BadRequest",
    "BorrowedEngine",
    "Engine",
    "EngineStats",
    "FinishReason",
    "GenerateRequest",
    "Generation",
    "OnToken",
    "Sampling",
    "WeightSource",
    "as_engine",
]

FinishReason = Literal["stop", "length", "aborted"]
OnToken = Callable[[int], None]
"""Receives the id of each token in the event loop, in order, as it is sampled."""
MEMORY_TAGS: tuple[str, ...] = ("kv_cache", "weights")
"""Memory that `Engine.sleep` can free, in the order of freeing; it is reallocated in reverse order."""


class BadRequest(AgentError):
    """A request that must not reach the model: no ids, ids outside the vocabulary, or too many of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy decoding."""

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Sample from the k most likely tokens only; 0: all."""
    min_p: float = 0.0
    """Sample only tokens whose probability is at least this fraction of the most likely token's."""
    stop_ids: tuple[int, ...] = ()
    """Any of these ids ends the reply and is included in it."""
    seed: int = 0
    """The reply depends on the seed, the prompt and the weights, not on other requests in the batch."""

    def __post_init__(self) -> None:
        checks = {
            "max_tokens >= 1": self.max_tokens >= 1,
            "temperature >= 0": math.isfinite(self.temperature) and self.temperature >= 0,
            "0 < top_p <= 1": 0 < self.top_p <= 1,
            "top_k >= 0": self.top_k >= 0,
            "0 <= min_p < 1": 0 <= self.min_p < 1,
            "seed >= 0": self.seed >= 0,
        }
        for rule, holds in checks.items():
            if not holds:
                raise ValueError(f"sampling needs {rule}: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request for one reply.

    Example:
        >>> GenerateRequest(request_id="1", prompt_ids=(5, 7), session="episode-1").sampling.max_tokens
        64
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    """The whole conversation so far."""
    sampling: Sampling = field(default_factory=Sampling)
    session: str = ""
    """Requests of one session extend one another, so an engine can reuse their KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A sampled reply."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each id under the distribution it was sampled from."""
    finish_reason: FinishReason
    version_spans: tuple[tuple[int, int], ...] = ()
    """(weight version, number of tokens) in order: several if the weights changed during the reply."""
    queue_seconds: float = 0.0
    generate_seconds: float = 0.0
    routed_experts: RoutedExperts | None = None
    """Experts chosen for every token of prompt and reply but the last, which no pass has read yet; ``None``
    where an engine does not report them. If weights changed during the reply: those of the newest weights."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probs")
        if sum(count for _, count in self.version_spans) != len(self.token_ids):
            raise ValueError(f"version spans {self.version_spans} do not add up to {len(self.token_ids)}")

    @property
    def version(self) -> int | None:
        """The oldest weight version that generated any of the tokens."""
        return min((version for version, _ in self.version_spans), default=None)

    def experts_of_turn(self, prompt: int, added: int) -> RoutedExperts | None:
        """Return the experts of the tokens that earlier turns of the same row do not cover.

        Args:
            prompt: Number of prompt ids of the request.
            added: Number of them that this turn added to its row.
        """
        experts, end = self.routed_experts, prompt + len(self.token_ids) - 1
        if experts is None or experts.num_tokens < end:
            return None
        return experts.part(max(prompt - added - 1, 0), end)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Source of new weights: tensors by name, tensors in buckets, or a folder in Hugging Face format."""

    tensors: Mapping[str, Any] | None = None
    path: Path | None = None
    buckets: Callable[[], Iterable[Sequence[tuple[str, Any]]]] | None = None
    """Yields a few named tensors at a time, so that no second copy of all weights is in memory. If several
    processes hold the weights, all must iterate; only the buckets of rank 0 contain tensors."""

    def __post_init__(self) -> None:
        if sum(kind is not None for kind in (self.tensors, self.path, self.buckets)) != 1:
            raise ValueError("a weight source needs exactly one of tensors, path and buckets")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters and memory of an engine; 0 where an engine does not report a value."""

    passes: int = 0
    """Forward passes."""
    computed_tokens: int = 0
    """Tokens computed by the model: prompt tokens that were not cached, and sampled tokens."""
    prefix_hit_tokens: int = 0
    """Tokens found in the KV cache when a reply started, so that they were not computed."""
    reused_tokens: int = 0
    """Tokens sampled from a cached state, without a pass of the model."""
    evicted_tokens: int = 0
    """Tokens dropped from the KV cache to make room."""
    evicted_sessions: int = 0
    """Sessions that lost a part of their KV cache that way."""
    preempted: int = 0
    """Replies that lost their KV cache to make room and were recomputed."""
    running: int = 0
    waiting: int = 0
    sessions: int = 0
    cached_tokens: int = 0
    """Tokens with allocated KV cache; at most ``cache_tokens``."""
    cache_bytes: int = 0
    """Bytes of that KV cache."""
    weight_bytes: int = 0
    """Bytes of the weights; 0 while they are released."""


class Engine(Protocol):
    """Token ids in, token ids out.

    A class that inherits from this protocol gets defaults for the optional methods below ``close``;
    `as_engine` adds them to an object that does not.
    """

    @property
    def version(self) -> int:
        """Version of the current weights."""

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and reply together."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one reply. A cancelled call stops generating at once.

        Raises:
            BadRequest: The request cannot be served.
            EngineLost: The engine failed; another replica may serve the request.
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these replies now; each returns its tokens so far as ``aborted``. Ignores unknown ids."""

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Use new weights from the next token on; drop everything computed with the old ones."""

    async def pause(self) -> None:
        """Stop generating until `resume`; requests wait."""

    async def resume(self) -> None:
        """Continue after `pause`."""

    async def forget(self, session: str) -> None:
        """Tell the engine that a session has ended, so that it may drop its KV cache."""

    async def close(self) -> None:
        """Stop, and fail all pending requests."""

    async def stream(self, request: GenerateRequest, on_token: OnToken) -> Generation:
        """Sample one reply as `generate` does, and pass on its tokens as they are sampled.

        Returns the same reply as `generate`. An engine that cannot do this reports no token before the end.
        """
        return await self.generate(request)

    @property
    def num_replicas(self) -> int:
        """Number of copies of the model that generate independently."""
        return 1

    @property
    def sampled_tokens(self) -> tuple[int, ...]:
        """Tokens of the replies so far, by replica; empty where they are not counted."""
        return ()

    @property
    def weight_dtype(self) -> str:
        """The dtype in which new weights are sent: that of the engine, or float32 if it is not known."""
        return "float32"

    @property
    def weight_route(self) -> str:
        """How weights reach it: ``memory`` in the same process, else as in ``engine.weight_route``."""
        return "memory"

    @property
    def weight_bytes_sent(self) -> int | None:
        """Bytes of the last weight update, counted once for all replicas; ``None``: all weights were sent."""
        return None

    async def sleep(self, tags: Sequence[str] = MEMORY_TAGS, *, replicas: Sequence[int] | None = None) -> int:
        """Pause and free the memory named by ``tags`` until `wake_up`; requests wait.

        Args:
            tags: Memory to free; an engine that cannot free it only pauses.
            replicas: The replicas that sleep; default all. The others continue.

        Returns:
            Bytes freed, as far as the engine reports it.
        """
        await self.pause()
        return 0

    async def wake_up(self, *, replicas: Sequence[int] | None = None) -> None:
        """Reallocate memory freed by `sleep` and continue, with the last weights received."""
        await self.resume()

    async def reconnect(self) -> bool:
        """Try to bring a lost engine back; returns False if it never can, raises if not yet."""
        return False

    async def stats(self) -> EngineStats:
        """Counters and memory of the engine."""
        return EngineStats()


class _CompletedEngine(Engine):
    """A partial engine, with defaults for the methods it lacks."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        for name in _METHODS:
            if hasattr(engine, name):
                setattr(self, name, getattr(engine, name))

    @property
    def version(self) -> int:
        return int(self._engine.version)

    @property
    def context_length(self) -> int:
        return int(self._engine.context_length)

    async def generate(self, request: GenerateRequest) -> Generation:
        raise NotImplementedError  # replaced in __init__

    async def abort(self, request_ids: Sequence[str]) -> None:
        return None

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        raise UsageError(f"{type(self._engine).__name__} does not support update_weights.")

    async def pause(self) -> None:
        raise UsageError(f"{type(self._engine).__name__} does not support pause.")

    async def resume(self) -> None:
        raise UsageError(f"{type(self._engine).__name__} does not support resume.")

    async def forget(self, session: str) -> None:
        return None

    async def close(self) -> None:
        return None


_METHODS = (
    *("generate", "abort", "update_weights", "pause", "resume", "forget", "close"),
    *("stream", "sleep", "wake_up", "reconnect", "stats"),
)
_PROPERTIES = ("num_replicas", "sampled_tokens", "weight_dtype", "weight_route", "weight_bytes_sent")


def as_engine(engine: Any) -> Engine:
    """Return ``engine`` as a complete `Engine`: missing methods get defaults.

    ``version``, ``context_length`` and ``generate`` are required. Missing `Engine.abort`, `Engine.forget` and
    `Engine.close` do nothing; a missing `Engine.update_weights`, `Engine.pause` or `Engine.resume` raises.
    """
    for name in ("version", "context_length", "generate"):
        if not hasattr(engine, name):
            raise UsageError(f"{type(engine).__name__} is not an engine: it has no {name!r}.")
    if all(hasattr(engine, name) for name in (*_METHODS, *_PROPERTIES)):
        complete: Engine = engine
        return complete
    return _CompletedEngine(engine)


class BorrowedEngine:
    """An engine that stays open, or a factory of one that is created on first use and closed here."""

    def __init__(self, engine: Engine | Callable[[], Engine]) -> None:
        self._make = engine if callable(engine) else None
        self._engine = None if callable(engine) else as_engine(engine)

    def get(self) -> Engine:
        """Return the engine, created on the first call."""
        if self._engine is None:
            assert self._make is not None
            self._engine = as_engine(self._make())
        return self._engine

    async def close(self) -> None:
        """Close the engine if it was created here."""
        if self._make is not None and self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.close()
