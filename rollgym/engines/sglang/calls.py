"""Replies under way: each a series of calls, as a reply that is interrupted is asked for again from there."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field

from rollgym.engines import FinishReason, GenerateRequest, Generation
from rollgym.engines.sglang.wire import Piece, Spans


@dataclass(slots=True, eq=False)
class Call:
    """One reply: what it has so far, and the HTTP call that is out for it."""

    request: GenerateRequest
    most: int
    """How many tokens it may have."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: Spans = field(default_factory=list)
    rid: str = ""
    task: asyncio.Task[bytes] | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = field(default_factory=time.perf_counter)
    waited: float = 0.0

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt and what was drawn."""
        return (*self.request.prompt_ids, *self.token_ids)

    @property
    def room(self) -> int:
        """How many more tokens it may have."""
        return self.most - len(self.token_ids)

    def renew(self) -> str:
        """A name for the next HTTP call. All are equally long: a server aborts by the beginning of a name."""
        self.rid = uuid.uuid4().hex
        return self.rid

    def add(self, piece: Piece) -> FinishReason | None:
        """Take in what a call brought; why the reply is over, if it is."""
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        for version, count in piece.spans:
            if self.spans and self.spans[-1][0] == version:
                count += self.spans.pop()[1]
            self.spans.append((version, count))
        if piece.token_ids and piece.token_ids[-1] in self.request.sampling.stop_ids:
            return "stop"
        if not self.room or piece.kind == "length":
            return "length"
        # Aborted, or the model's own end, which nobody asked to stop at.
        return None

    def made(self, reason: FinishReason) -> Generation:
        """The reply."""
        return Generation(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            version_spans=tuple(self.spans),
            queue_seconds=self.waited,
            generate_seconds=time.perf_counter() - self.began - self.waited,
        )
