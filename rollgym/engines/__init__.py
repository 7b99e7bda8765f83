"""Who turns tokens into tokens: the engine protocol.

An engine gets the ids of a whole conversation and samples what comes next. It never sees text, and what it
reports is what it really did: the ids it sampled, the log-probability each had under the distribution it was
sampled from (temperature, top-p, top-k and min-p included), and the version of the weights behind each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rollgym.errors import AgentError

__all__ = [
    "BadRequest",
    "BorrowedEngine",
    "Engine",
    "FinishReason",
    "GenerateRequest",
    "Generation",
    "Sampling",
    "WeightSource",
]

FinishReason = Literal["stop", "length", "aborted"]


class BadRequest(AgentError):
    """A request that must not reach the model: no ids, ids it does not know, or more than fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw tokens. Temperature 0 takes the most likely one."""

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Only the k most likely tokens; 0 means all."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the most likely one."""
    stop_ids: tuple[int, ...] = ()
    """Any of these ends the reply; it is part of what was sampled."""
    seed: int = 0
    """The reply depends on the seed, the prompt and the weights, never on what else is being generated."""

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
    """One reply to draw."""

    request_id: str
    prompt_ids: tuple[int, ...]
    """The whole conversation so far."""
    sampling: Sampling = field(default_factory=Sampling)
    session: str = ""
    """Requests of one session extend one another, so that an engine can keep what it has computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What was sampled."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each id, under the distribution it was drawn from."""
    finish_reason: FinishReason
    version_spans: tuple[tuple[int, int], ...] = ()
    """(version, how many tokens) in order: more than one where weights changed in the middle."""
    queue_seconds: float = 0.0
    generate_seconds: float = 0.0

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probs")
        if sum(count for _, count in self.version_spans) != len(self.token_ids):
            raise ValueError(f"version spans {self.version_spans} do not add up to {len(self.token_ids)}")

    @property
    def version(self) -> int | None:
        """The oldest weights that had a part in it."""
        return min((version for version, _ in self.version_spans), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where new weights come from: tensors by name, at once or in buckets, or a folder in HF format."""

    tensors: Mapping[str, Any] | None = None
    path: Path | None = None
    buckets: Callable[[], Iterable[Sequence[tuple[str, Any]]]] | None = None
    """Names and tensors, some at a time, so that all of them are never in memory twice. Where several
    processes hold the weights, all must go through their buckets; only those of rank 0 have any in them."""

    def __post_init__(self) -> None:
        if sum(kind is not None for kind in (self.tensors, self.path, self.buckets)) != 1:
            raise ValueError("a weight source is one of tensors, a path and buckets")


class Engine(Protocol):
    """Tokens in, tokens out."""

    @property
    def version(self) -> int:
        """Of the weights in use."""

    @property
    def context_length(self) -> int:
        """The longest prompt and reply together."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Draw one reply. A cancelled call stops generating at once. `BadRequest` where it cannot."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these replies now; each returns what it has, as ``aborted``. Unknown ids are ignored."""

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        """Use new weights from the next token on; nothing computed with the old ones is used again."""

    async def pause(self) -> None:
        """Generate nothing until `resume`; requests wait."""

    async def resume(self) -> None:
        """Go on."""

    async def forget(self, session: str) -> None:
        """Drop what is kept for a session that has ended."""

    async def close(self) -> None:
        """Stop, and fail what still waits."""


class BorrowedEngine:
    """An engine that was given, and stays open; or one to be made when it is first asked for, and closed."""

    def __init__(self, engine: Engine | Callable[[], Engine]) -> None:
        self._make = engine if callable(engine) else None
        self._engine = None if callable(engine) else engine

    def get(self) -> Engine:
        """The engine."""
        if self._engine is None:
            assert self._make is not None
            self._engine = self._make()
        return self._engine

    async def close(self) -> None:
        """Close it, if it was made here."""
        if self._make is not None and self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.close()
