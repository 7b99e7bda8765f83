"""State of one reply while it is being generated."""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence

from torch import Tensor

from rollgym.core.routed_experts import RoutedExperts
from rollgym.engines.base import FinishReason, GenerateRequest, Generation, OnToken
from rollgym.engines.embedded.prefix_cache import Node
from rollgym.engines.embedded.sampling import stream

__all__ = ["SequenceState"]

Deliver = Callable[[Generation | BaseException], None]


class SequenceState:
    """A request, its sampled tokens, and how many of its tokens are in the KV cache."""

    def __init__(
        self, request: GenerateRequest, limit: int, deliver: Deliver, on_token: OnToken | None = None
    ) -> None:
        self.request = request
        self.sampling = request.sampling
        self.stream = stream(request.sampling.seed)
        self.limit = limit
        """Maximum number of tokens to sample: ``max_tokens`` or what fits into the context."""
        self.deliver = deliver
        self.on_token = on_token
        self.ids = list(request.prompt_ids)
        self._prefixes: list[bytes] = []
        self.cached = 0
        """Number of ids whose keys and values are in the KV cache."""
        self.states: dict[int, Tensor] = {}
        """Last hidden states by position, until they are in the prefix cache."""
        self.looked_up = (0, -1)
        """Number of ids and of the cache's insertions when no cached state was found."""
        self.reuses = False
        """Whether it samples from cached states, so that it needs no slot yet."""
        self.node: Node | None = None
        """End of its prefix in the prefix cache, while it runs."""
        self.keep = bool(request.session)
        """Whether its session refers to its prefix afterwards."""
        self.session = request.session
        self.logprobs: list[float] = []
        self.spans: list[list[int]] = []
        self.routed_experts: RoutedExperts | None = None
        """Experts of the ids that were computed, once it has ended and if they are recorded."""
        self.submitted = time.perf_counter()
        self.started: float | None = None

    @property
    def pending(self) -> int:
        """Number of ids to compute before the next token can be sampled: at least one."""
        return len(self.ids) - self.cached

    def prefixes(self, block: int | None) -> Sequence[bytes]:
        """Return digests of the first block of ids, the first two blocks, and so on; None: no blocks."""
        while block is not None and (len(self._prefixes) + 1) * block <= len(self.ids):
            start = len(self._prefixes) * block
            before = self._prefixes[-1] if self._prefixes else b""
            ids = array("q", self.ids[start : start + block]).tobytes()
            self._prefixes.append(hashlib.blake2b(before + ids, digest_size=16).digest())
        return self._prefixes

    def add(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Append a sampled token; returns the finish reason if it is the last."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.on_token is not None:
            self.on_token(token)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][1] += 1
        else:
            self.spans.append([version, 1])
        if token in self.sampling.stop_ids:
            return "stop"
        return "length" if len(self.logprobs) >= self.limit else None

    def finish(self, reason: FinishReason) -> None:
        """Deliver the reply."""
        now = time.perf_counter()
        started = now if self.started is None else self.started
        self.deliver(
            Generation(
                token_ids=tuple(self.ids[len(self.request.prompt_ids) :]),
                logprobs=tuple(self.logprobs),
                finish_reason=reason,
                version_spans=tuple((version, count) for version, count in self.spans),
                queue_seconds=started - self.submitted,
                generate_seconds=now - started,
                routed_experts=self.routed_experts,
            )
        )
