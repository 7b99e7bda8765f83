"""Continuous batching: the requests of the engine and their KV cache.

Sequences join and leave at every pass. Each running sequence has a slot of the KV cache; running sequences
always occupy the first slots. A pass computes at least one token of every running sequence; the rest of the
budget prefills prompts.

Prefixes are shared: what a sequence has computed is copied into the `PrefixCache` after each part of its
prompt and at its end, and a sequence starts from the longest prefix found there. A sequence waits while a
running one is about to compute a longer prefix of it, so siblings that arrive together compute it once.
Where even the state after the last token is cached, the next token is sampled without a pass: siblings with
the same prompt, and replies that begin with the same tokens, compute nothing until they differ.

If memory is short, prefixes are evicted (unreferenced ones first), then the newest running sequence is
preempted and recomputed later.

Only the engine's thread calls this; nothing here is asynchronous.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rollgym.core.errors import AgentError, one_line
from rollgym.engines.base import FinishReason
from rollgym.engines.embedded.attention import Span
from rollgym.engines.embedded.kv_cache import KVBlock, KVCache, round_up
from rollgym.engines.embedded.model import Model
from rollgym.engines.embedded.precision import SMALLEST
from rollgym.engines.embedded.prefix_cache import Hit, Node, PrefixCache, common_prefix
from rollgym.engines.embedded.sampling import draw, uniforms
from rollgym.engines.embedded.sequence import SequenceState

__all__ = ["LENGTH_STEP", "BatchScheduler", "Counts"]

LENGTH_STEP = 32
"""The length of the KV cache is a multiple of this. A longer cache costs time: slots are further apart."""
_REUSED_PER_PASS = 16
"""Tokens that a sequence samples from cached states before the running sequences continue."""
_WORTH_WAITING = 100_000_000
"""Parameters times tokens for which a sequence waits until another has computed them; 8 to 32 tokens."""


@dataclass(slots=True)
class Counts:
    """Counters since the start."""

    passes: int = 0
    computed: int = 0
    """Tokens computed by the model."""
    prefix_hits: int = 0
    """Tokens that were found in the prefix cache instead of being computed."""
    reused: int = 0
    """Tokens that were sampled from a cached state, without a pass of the model."""
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
        self.prefixes = PrefixCache()
        self._trim_at = cache_tokens // 4
        self._growth = 1.0625 if model.parameters < SMALLEST else 1.25
        self.worth_waiting = max(8, min(32, _WORTH_WAITING // model.parameters))
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
        return self.kv_cache.tokens + self.prefixes.tokens

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
        """Drop a session's reference to its prefix, now or when its running sequence ends."""
        self.prefixes.release(session)
        for seq in (*self.running, *self.waiting):
            if seq.session == session:
                seq.keep = False

    def load_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Load new weights. Running sequences keep their tokens and recompute their KV cache."""
        self.invalidate_cache()
        self.version = version
        self.model.load(tensors)

    def invalidate_cache(self) -> None:
        """Drop all keys and values; the allocated size stays. Running sequences start again."""
        self.prefixes.clear()
        self._trim_at = self.cache_tokens // 4
        for seq in self.waiting:
            seq.reuses = False
        for seq in reversed(self.running):
            seq.cached, seq.node = 0, None
            seq.states.clear()
            self.waiting.appendleft(seq)
        self.running = []
        self.kv_cache = KVCache(self.model.shape, self.kv_cache.slots, self.kv_cache.length)

    def free_cache(self) -> None:
        """Free the memory of the KV cache; running sequences recompute it when they continue."""
        self.invalidate_cache()
        self.kv_cache = KVCache(self.model.shape)

    def fail(self, error: BaseException, sequences: Iterable[SequenceState]) -> None:
        """Finish these sequences with an error and drop their KV cache."""
        for seq in list(sequences):
            self._remove([seq], keep=False)
            seq.deliver(error)

    def step(self) -> None:
        """One pass: admit, compute, sample, finish. A model error fails the running batch."""
        if self.model.has_states:
            self._sample_from_cache()
        self._admit()
        try:
            spans = self._schedule()
            if not spans:
                return
            ready = [span.slot for seq, span in self._pairs(spans) if seq.pending == len(span.ids)]
            drawing = [self.running[slot] for slot in ready]
            states = self.model.states(spans, self.kv_cache, ready)
            drawn = self._draw(drawing, states)
        except Exception as error:
            self._fail_batch(error)
            return
        self.counts.passes += 1
        self.counts.computed += sum(len(span.ids) for span in spans)
        for seq, span in self._pairs(spans):
            seq.cached += len(span.ids)
        if self.model.has_states:
            for seq, state in zip(drawing, states, strict=False):
                seq.states[len(seq.ids) - 1] = state
        prefilled = [seq for seq, span in self._pairs(spans) if len(span.ids) > 1]
        self._append_tokens(drawn)
        for seq in prefilled:
            if seq in self.running:
                self._share(seq)

    def _pairs(self, spans: list[Span]) -> Iterable[tuple[SequenceState, Span]]:
        return zip(self.running, spans, strict=True)

    def _sample_from_cache(self) -> None:
        """Sample for waiting sequences while the states that their next tokens depend on are cached."""
        waiting = list(islice(self.waiting, self.max_batch))
        for _ in range(_REUSED_PER_PASS):
            found = [(seq, state) for seq in waiting if (state := self._cached_state(seq)) is not None]
            if not found:
                return
            waiting = [seq for seq, _ in found]
            try:
                drawn = self._draw(waiting, torch.stack([state for _, state in found]))
            except Exception as error:
                self.fail(AgentError(f"The model failed: {one_line(error)}"), waiting)
                return
            for seq in waiting:
                seq.started = seq.started or time.perf_counter()
            self.counts.reused += len(drawn)
            ended = self._append_tokens(drawn)
            self.counts.prefix_hits += sum(len(seq.ids) - 1 for seq in ended)
            waiting = [seq for seq in waiting if seq not in ended]

    def _cached_state(self, seq: SequenceState) -> Tensor | None:
        """Return the state after a waiting sequence's last token; looked up again only after an insertion."""
        if seq.looked_up == (len(seq.ids), self.prefixes.insertions):
            return None
        state = self.prefixes.state(seq.ids)
        seq.reuses = state is not None
        if state is None:
            seq.looked_up = len(seq.ids), self.prefixes.insertions
        return state

    def _draw(self, sequences: list[SequenceState], states: Tensor) -> list[tuple[SequenceState, int, float]]:
        """Sample the next token of sequences, whose states come first."""
        if not sequences:
            return []
        logits = self.model.logits(states)[: len(sequences)]
        numbers = uniforms([seq.stream for seq in sequences], [len(seq.ids) for seq in sequences])
        tokens, logprobs = draw(logits, [seq.sampling for seq in sequences], numbers)
        return list(zip(sequences, tokens, logprobs, strict=True))

    def _append_tokens(self, drawn: list[tuple[SequenceState, int, float]]) -> set[SequenceState]:
        """Add sampled tokens to their sequences; returns those that ended."""
        failed: list[SequenceState] = []
        finished: list[tuple[SequenceState, FinishReason]] = []
        for seq, token, logprob in drawn:
            if math.isnan(logprob):
                if seq in self.running:
                    self.kv_cache.wipe(self.running.index(seq))
                self.fail(AgentError("The model produced NaN logits: check its weights."), [seq])
                failed.append(seq)
                continue
            reason = seq.add(token, logprob, self.version)
            if reason is not None:
                finished.append((seq, reason))
        self._remove([seq for seq, _ in finished])
        for seq, reason in finished:
            seq.finish(reason)
        return {seq for seq, _ in finished}.union(failed)

    def _fail_batch(self, error: Exception) -> None:
        """Fail all running sequences after a failed pass, and drop the KV cache."""
        failed, self.running = self.running, []
        self.kv_cache = KVCache(self.model.shape)
        for seq in failed:
            self._refer(seq, None)
            seq.deliver(AgentError(f"The model failed: {one_line(error)}"))

    def _admit(self) -> None:
        """Start waiting sequences while there is room, except those that wait for a prefix."""
        for seq in list(islice(self.waiting, self.max_batch - len(self.running))):
            if seq.reuses:
                continue
            hit = self.prefixes.match(seq.ids, len(seq.ids) - 1)
            if self._waits(seq, sum(count for _, count in hit)):
                continue
            try:
                if not self._start(seq, len(self.running), hit):
                    return
            except Exception as error:  # out of memory
                self.fail(AgentError(f"The engine could not start the reply: {one_line(error)}"), [seq])
                continue
            self.waiting.remove(seq)
            self.running.append(seq)
            seq.started = seq.started or time.perf_counter()

    def _waits(self, seq: SequenceState, cached: int) -> bool:
        """Return True while a running sequence is about to compute a prefix longer than the cached one."""
        end = cached + self.worth_waiting
        if end >= len(seq.ids):
            return False
        part = seq.ids[cached:end]
        for other in self.running:
            if other.pending > 1 and other.ids[cached:end] == part:
                length = min(common_prefix(seq.ids, other.ids), len(seq.ids) - 1)
                if length >= end and other.cached < length:
                    return True
        return False

    def _start(self, seq: SequenceState, slot: int, hit: Hit) -> bool:
        """Copy the cached prefix of a sequence into a slot; returns False if there is no room yet."""
        if not self._reserve(slot + 1, max(self._longest(), len(seq.ids) + 1)):
            return False
        seq.cached = 0
        for node, count in hit:  # those evicted just now still have their keys and values
            self.kv_cache.load(slot, seq.cached, node.block, count)
            seq.cached += count
        self.counts.prefix_hits += seq.cached
        attached = [node for node, _ in hit if node.parent is not None]
        self._refer(seq, attached[-1] if attached else None)
        return True

    def _refer(self, seq: SequenceState, node: Node | None) -> None:
        """Move a running sequence's reference to another node."""
        if seq.node is not None:
            seq.node.running -= 1
        if node is not None:
            node.running += 1
        seq.node = node

    def _schedule(self) -> list[Span]:
        """Return what each slot computes next. The prefill budget goes to the oldest sequences first."""
        while self.running and not self._reserve(len(self.running), self._longest()):
            self._preempt(max(self.running, key=lambda seq: seq.submitted))
        budget, sizes = self.prefill_chunk, {}
        for seq in sorted((seq for seq in self.running if seq.pending > 1), key=lambda seq: seq.submitted):
            sizes[seq] = min(seq.pending, 1 + budget)
            budget -= sizes[seq] - 1
        return [
            Span(
                slot,
                seq.cached,
                seq.ids[seq.cached : seq.cached + sizes.get(seq, 1)],
                seq.prefixes(self.model.rule.split),
            )
            for slot, seq in enumerate(self.running)
        ]

    def _preempt(self, seq: SequenceState) -> None:
        """Move a running sequence back to the queue; it keeps its tokens and is recomputed."""
        self._vacate(seq)
        self._refer(seq, None)
        seq.cached = 0
        seq.states.clear()
        self.waiting.appendleft(seq)
        self.counts.preempted += 1

    def _longest(self) -> int:
        return max((len(seq.ids) for seq in self.running), default=0)

    def _reserve(self, slots: int, length: int) -> bool:
        """Grow the KV cache to this size within ``cache_tokens``, evicting prefixes; False if impossible."""
        length = self._padded_length(length)
        wide, long = slots > self.kv_cache.slots, length > self.kv_cache.length
        if not wide and not long:
            return True
        # Over-allocate if possible: resizing copies.
        soon = max(2 * slots, slots + len(self.waiting))
        roomy_slots = max(4, min(soon, self.max_batch)) if wide else self.kv_cache.slots
        roomy_length = self._padded_length(int(length * self._growth)) if long else self.kv_cache.length
        for size in ((roomy_slots, roomy_length), (slots, roomy_length), (slots, length)):
            if size[0] * size[1] + self.prefixes.tokens <= self.cache_tokens:
                return self._resize(*size)
        if slots * length > self.cache_tokens:
            return False
        self._evict(slots * length + self.prefixes.tokens - self.cache_tokens)
        return self._resize(slots, length)

    def _padded_length(self, length: int) -> int:
        return round_up(self.model.rule.cache_length(length), LENGTH_STEP)

    def _evict(self, wanted: int, *, referenced: bool = True) -> None:
        self.prefixes.evict(wanted, slack=self.cache_tokens // 32, referenced=referenced)

    def _resize(self, slots: int, length: int) -> bool:
        if (slots, length) != (self.kv_cache.slots, self.kv_cache.length):
            self.kv_cache.resize(slots, length, used=len(self.running))
        return True

    def _remove(self, sequences: Sequence[SequenceState], *, keep: bool = True) -> None:
        """Remove sequences; what they have computed stays in the prefix cache if it fits."""
        finished: list[tuple[SequenceState, int, KVBlock]] = []
        for seq in sequences:
            if seq in self.waiting:
                self.waiting.remove(seq)
                if keep and seq.keep and (hit := self.prefixes.match(seq.ids, len(seq.ids))):
                    self.prefixes.hold(seq.session, hit[-1][0])
            elif seq in self.running:
                slot = self.running.index(seq)
                seq.routed_experts = self.kv_cache.read(slot, 0, seq.cached).routed_experts()
                if keep and seq.cached:
                    start = seq.cached - self.prefixes.missing(seq.ids, seq.cached)
                    finished.append((seq, start, self.kv_cache.read(slot, start, seq.cached).clone()))
                self._vacate(seq)
                if not keep:
                    self._refer(seq, None)
        for seq, start, block in finished:
            self._keep(seq, start, block)

    def _keep(self, seq: SequenceState, start: int, block: KVBlock) -> None:
        """Store the keys and values of a finished sequence, for its session and for others."""
        if self.tokens + block.tokens > self.cache_tokens:
            self._shrink()
        if self._make_room(seq, referenced=True) and seq.cached - self._missing(seq) >= start:
            node = self._insert(seq, lambda at: block.part(at - start))
            if seq.keep:
                self.prefixes.hold(seq.session, node)
        elif seq.keep:
            self.prefixes.release(seq.session)
        self._refer(seq, None)
        self._trim()

    def _share(self, seq: SequenceState) -> None:
        """Store what a running sequence has computed so far, unless that evicts referenced prefixes."""
        if self._make_room(seq, referenced=False):
            slot = self.running.index(seq)
            self._refer(seq, self._insert(seq, lambda at: self.kv_cache.read(slot, at, seq.cached)))
            self._trim()

    def _insert(self, seq: SequenceState, read: Callable[[int], KVBlock]) -> Node:
        node = self.prefixes.insert(seq.ids, seq.cached, read, session=seq.session, held=seq.node)
        self.prefixes.add_states(seq.ids, seq.states)
        seq.states.clear()
        return node

    def _missing(self, seq: SequenceState) -> int:
        return self.prefixes.missing(seq.ids, seq.cached)

    def _make_room(self, seq: SequenceState, *, referenced: bool) -> bool:
        """Make room in the prefix cache for what a sequence has computed; returns False if there is none."""
        while (short := self.tokens + self._missing(seq) - self.cache_tokens) > 0:
            before = self.prefixes.tokens
            self._evict(short, referenced=referenced)
            if self.prefixes.tokens == before:
                return False
        return True

    def _trim(self) -> None:
        """Keep unreferenced prefixes from filling all of the allowed memory."""
        quarter = self.cache_tokens // 4
        if self.prefixes.tokens > self._trim_at:
            self._evict(self.prefixes.tokens - quarter, referenced=False)
            self._trim_at = max(quarter, self.prefixes.tokens + quarter // 4)

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
