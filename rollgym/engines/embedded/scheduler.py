"""Continuous batching: which sequences run, what each computes in the next pass, and their KV cache.

Sequences join and leave at every pass. Each running sequence has a slot of the KV cache; running sequences
always occupy the first slots. A pass computes at least one token of every running sequence; the rest of the
budget prefills prompts. If memory is short, idle sessions are evicted (least recently used first), then the
newest running sequence is preempted and recomputed later.

Only the engine's thread calls this; nothing here is asynchronous.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rollgym.core.errors import AgentError, one_line
from rollgym.engines.base import FinishReason
from rollgym.engines.embedded.attention import Span
from rollgym.engines.embedded.kv_cache import CachedPrefix, KVCache, SessionCache, common_prefix, round_up
from rollgym.engines.embedded.model import Model
from rollgym.engines.embedded.sampling import draw, uniforms
from rollgym.engines.embedded.sequence import SequenceState

__all__ = ["LENGTH_STEP", "BatchScheduler", "Counts"]

LENGTH_STEP = 32
"""The length of the KV cache is a multiple of this. A longer cache costs time: slots are further apart."""


@dataclass(slots=True)
class Counts:
    """Counters since the start."""

    passes: int = 0
    computed: int = 0
    """Tokens computed by the model."""
    evicted: int = 0
    """Idle sessions dropped to make room."""
    preempted: int = 0
    """Running sequences that were moved back to the queue to make room."""


class BatchScheduler:
    """Requests, KV cache and weights of the engine between two passes."""

    def __init__(self, model: Model, *, max_batch: int, cache_tokens: int, prefill_chunk: int) -> None:
        self.model = model
        self.version = 0
        self.max_batch = max_batch
        self.cache_tokens = cache_tokens
        self.prefill_chunk = prefill_chunk
        self.kv_cache = KVCache(model.shape)
        self.sessions = SessionCache()
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        """By slot."""
        self.counts = Counts()

    @property
    def idle(self) -> bool:
        """True if there is nothing to compute."""
        return not self.running and not self.waiting

    @property
    def tokens(self) -> int:
        """Tokens with allocated KV cache."""
        return self.kv_cache.tokens + self.sessions.tokens

    def submit(self, seq: SequenceState) -> None:
        """Queue a request."""
        self.waiting.append(seq)

    def find(self, request_ids: Container[str]) -> list[SequenceState]:
        """Return the running and waiting sequences with these request ids."""
        return [seq for seq in (*self.running, *self.waiting) if seq.request.request_id in request_ids]

    def abort(self, sequences: Iterable[SequenceState]) -> None:
        """Finish these sequences with their tokens so far."""
        for seq in sequences:
            self._remove([seq])
            seq.finish("aborted")

    def forget(self, session: str) -> None:
        """Drop the KV cache of a session, now and when its running sequence ends."""
        self.sessions.pop(session)
        for seq in (*self.running, *self.waiting):
            if seq.session == session:
                seq.keep = False

    def load_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Load new weights. Running sequences keep their tokens and recompute their KV cache."""
        self.invalidate_cache()
        self.version = version
        self.model.load(tensors)

    def invalidate_cache(self) -> None:
        """Drop all keys and values; the allocated size stays."""
        self.sessions.clear()
        for seq in self.running:
            seq.cached = 0
        self.kv_cache = KVCache(self.model.shape, self.kv_cache.slots, self.kv_cache.length)

    def free_cache(self) -> None:
        """Free the memory of the KV cache; running sequences recompute it when they continue."""
        self.invalidate_cache()
        self.kv_cache = KVCache(self.model.shape)

    def fail(self, error: BaseException, sequences: Iterable[SequenceState]) -> None:
        """Finish these sequences with an error and drop their KV cache."""
        for seq in list(sequences):
            seq.keep = False
            self._remove([seq])
            seq.deliver(error)

    def step(self) -> None:
        """One pass: admit, compute, sample, finish. A model error fails the running batch."""
        self._admit()
        try:
            spans = self._schedule()
            if not spans:
                return
            ready = [span.slot for seq, span in self._pairs(spans) if seq.pending == len(span.ids)]
            drawn = self._draw(
                [self.running[slot] for slot in ready], self.model.forward(spans, self.kv_cache, ready)
            )
        except Exception as error:
            self._fail_batch(error)
            return
        self.counts.passes += 1
        self.counts.computed += sum(len(span.ids) for span in spans)
        for seq, span in self._pairs(spans):
            seq.cached += len(span.ids)
        self._append_tokens(drawn)

    def _pairs(self, spans: list[Span]) -> Iterable[tuple[SequenceState, Span]]:
        return zip(self.running, spans, strict=True)

    def _draw(self, sequences: list[SequenceState], logits: Tensor) -> list[tuple[SequenceState, int, float]]:
        if not sequences:
            return []
        numbers = uniforms([seq.stream for seq in sequences], [len(seq.ids) for seq in sequences])
        tokens, logprobs = draw(logits, [seq.sampling for seq in sequences], numbers)
        return list(zip(sequences, tokens, logprobs, strict=True))

    def _append_tokens(self, drawn: list[tuple[SequenceState, int, float]]) -> None:
        finished: list[tuple[SequenceState, FinishReason]] = []
        for seq, token, logprob in drawn:
            if math.isnan(logprob):
                self.kv_cache.wipe(self.running.index(seq))
                self.fail(AgentError("The model produced NaN logits: check its weights."), [seq])
                continue
            reason = seq.add(token, logprob, self.version)
            if reason is not None:
                finished.append((seq, reason))
        self._remove([seq for seq, _ in finished])
        for seq, reason in finished:
            seq.finish(reason)

    def _fail_batch(self, error: Exception) -> None:
        """Fail all running sequences after a failed pass, and drop the KV cache."""
        failed, self.running = self.running, []
        self.kv_cache = KVCache(self.model.shape)
        for seq in failed:
            seq.deliver(AgentError(f"The model failed: {one_line(error)}"))

    def _admit(self) -> None:
        """Start waiting sequences while there is room."""
        while self.waiting and len(self.running) < self.max_batch:
            seq = self.waiting[0]
            try:
                if not self._start(seq, len(self.running)):
                    return
            except Exception as error:  # out of memory
                self.fail(AgentError(f"The engine could not start the reply: {one_line(error)}"), [seq])
                continue
            self.running.append(self.waiting.popleft())
            seq.started = seq.started or time.perf_counter()

    def _start(self, seq: SequenceState, slot: int) -> bool:
        """Load the cached prefix of a sequence into a slot; returns False if there is no room yet."""
        prefix = self.sessions.pop(seq.session)
        if not self._reserve(slot + 1, max(self._longest(), len(seq.ids) + 1)):
            if prefix is not None:
                self.sessions.put(seq.session, prefix)
            return False
        # The last id is always computed: the next token is sampled from its logits.
        seq.cached = min(common_prefix(seq.ids, prefix.ids), len(seq.ids) - 1) if prefix else 0
        if prefix is not None and seq.cached:
            self.kv_cache.load(slot, prefix.kv, seq.cached)
        return True

    def _schedule(self) -> list[Span]:
        """Return what each slot computes next. The prefill budget goes to the oldest sequences first."""
        while self.running and not self._reserve(len(self.running), self._longest()):
            self._preempt(max(self.running, key=lambda seq: seq.submitted))
        budget, sizes = self.prefill_chunk, {}
        for seq in sorted((seq for seq in self.running if seq.pending > 1), key=lambda seq: seq.submitted):
            sizes[seq] = min(seq.pending, 1 + budget)
            budget -= sizes[seq] - 1
        return [
            Span(slot, seq.cached, seq.ids[seq.cached : seq.cached + sizes.get(seq, 1)])
            for slot, seq in enumerate(self.running)
        ]

    def _preempt(self, seq: SequenceState) -> None:
        """Move a running sequence back to the queue; it keeps its tokens and is recomputed."""
        self._vacate(seq)
        seq.cached = 0
        self.waiting.appendleft(seq)
        self.counts.preempted += 1

    def _longest(self) -> int:
        return max((len(seq.ids) for seq in self.running), default=0)

    def _reserve(self, slots: int, length: int) -> bool:
        """Grow the KV cache to this size within ``cache_tokens``, evicting sessions; False if impossible."""
        length = self._padded_length(length)
        wide, long = slots > self.kv_cache.slots, length > self.kv_cache.length
        if not wide and not long:
            return True
        # Over-allocate if possible: resizing copies.
        roomy_slots = max(4, min(2 * slots, self.max_batch)) if wide else self.kv_cache.slots
        roomy_length = self._padded_length(length * 17 // 16) if long else self.kv_cache.length
        for size in ((roomy_slots, roomy_length), (slots, roomy_length), (slots, length)):
            if size[0] * size[1] + self.sessions.tokens <= self.cache_tokens:
                return self._resize(*size)
        if slots * length > self.cache_tokens:
            return False
        while slots * length + self.sessions.tokens > self.cache_tokens:
            self._evict()
        return self._resize(slots, length)

    def _padded_length(self, length: int) -> int:
        return round_up(self.model.rule.length(length), LENGTH_STEP)

    def _evict(self) -> bool:
        evicted = self.sessions.evict()
        self.counts.evicted += evicted
        return evicted

    def _resize(self, slots: int, length: int) -> bool:
        if (slots, length) != (self.kv_cache.slots, self.kv_cache.length):
            self.kv_cache.resize(slots, length)
        return True

    def _remove(self, sequences: Sequence[SequenceState]) -> None:
        """Remove sequences; the KV cache of their sessions is kept if it fits."""
        prefixes: list[tuple[str, CachedPrefix]] = []
        for seq in sequences:
            if seq in self.waiting:
                self.waiting.remove(seq)
            elif seq in self.running:
                if seq.keep and seq.cached:
                    kv = self.kv_cache.save(self.running.index(seq), seq.cached)
                    prefixes.append((seq.session, CachedPrefix(seq.ids[: seq.cached], kv)))
                self._vacate(seq)
        for session, prefix in prefixes:
            self._keep(session, prefix)

    def _keep(self, session: str, prefix: CachedPrefix) -> None:
        self.sessions.pop(session)
        if self.tokens + len(prefix.ids) > self.cache_tokens:
            self._shrink()
        while self.tokens + len(prefix.ids) > self.cache_tokens:
            if not self._evict():
                return
        self.sessions.put(session, prefix)

    def _shrink(self) -> None:
        """Shrink the KV cache if that frees at least a quarter of it."""
        slots, length = len(self.running), self._padded_length(self._longest())
        if slots * length <= self.kv_cache.tokens * 3 // 4:
            self._resize(slots, length)

    def _vacate(self, seq: SequenceState) -> None:
        """Free a slot by moving the last slot's sequence into it."""
        slot = self.running.index(seq)
        last = self.running.pop()
        if last is not seq:
            self.running[slot] = last
            self.kv_cache.move(len(self.running), slot, last.cached)
