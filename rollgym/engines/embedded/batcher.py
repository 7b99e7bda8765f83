"""Continuous batching: which replies run, what each computes in the next pass, what memory they have.

Replies join and leave at every pass. Each running reply has a slot of the arena, and the running ones are
always the first slots. A pass computes at least one token of every running reply, and with what is left of
the budget more of those that still have a prompt to get through. Where memory runs short, idle sessions go
first (longest idle first), then the reply that came last waits and is computed again later.

One thread calls all this; nothing here is asynchronous.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rollgym.engines import FinishReason
from rollgym.engines.embedded.attention import Span
from rollgym.engines.embedded.cache import Arena, Kept, Sessions, common_prefix, round_up
from rollgym.engines.embedded.model import Model
from rollgym.engines.embedded.run import Run
from rollgym.engines.embedded.sampling import draw, uniforms
from rollgym.errors import AgentError, one_line

__all__ = ["LENGTH_GRAIN", "Batcher", "Counts"]

LENGTH_GRAIN = 32
"""The arena's length is a multiple of this. It is kept short: gaps between slots cost time."""


@dataclass(slots=True)
class Counts:
    """What has been done so far."""

    passes: int = 0
    computed: int = 0
    """Tokens that went through the model."""
    evicted: int = 0
    """Idle sessions dropped for want of room."""
    set_back: int = 0
    """Running replies that had to wait for want of room."""


class Batcher:
    """The state of the engine between two passes."""

    def __init__(self, model: Model, *, max_batch: int, cache_tokens: int, prefill_chunk: int) -> None:
        self.model = model
        self.version = 0
        self.max_batch = max_batch
        self.cache_tokens = cache_tokens
        self.prefill_chunk = prefill_chunk
        self.arena = Arena(model.shape)
        self.sessions = Sessions()
        self.waiting: deque[Run] = deque()
        self.running: list[Run] = []
        """By slot."""
        self.counts = Counts()

    @property
    def idle(self) -> bool:
        """True where there is nothing to compute."""
        return not self.running and not self.waiting

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values memory is held for."""
        return self.arena.tokens + self.sessions.tokens

    def submit(self, run: Run) -> None:
        """Take a request in."""
        self.waiting.append(run)

    def find(self, request_ids: Container[str]) -> list[Run]:
        """The replies under way that have one of these ids."""
        return [run for run in (*self.running, *self.waiting) if run.request.request_id in request_ids]

    def abort(self, runs: Iterable[Run]) -> None:
        """End these replies with what they have."""
        for run in runs:
            self._leave([run])
            run.finish("aborted")

    def forget(self, session: str) -> None:
        """Keep nothing of a session, now or when what runs for it ends."""
        self.sessions.pop(session)
        for run in (*self.running, *self.waiting):
            if run.session == session:
                run.keep = False

    def swap(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Use new weights. Running replies keep what was sampled and compute all of it anew."""
        self.drop_computed()
        self.version = version
        self.model.load(tensors)

    def drop_computed(self) -> None:
        """Forget every key and value."""
        self.sessions.clear()
        for run in self.running:
            run.cached = 0
        self.arena = Arena(self.model.shape, self.arena.slots, self.arena.length)

    def empty_cache(self) -> None:
        """Hold no memory for keys and values; what runs is computed anew when it goes on."""
        self.drop_computed()
        self.arena = Arena(self.model.shape)

    def fail(self, error: BaseException, runs: Iterable[Run]) -> None:
        """End these replies with an error; nothing of them is kept."""
        for run in list(runs):
            run.keep = False
            self._leave([run])
            run.deliver(error)

    def step(self) -> None:
        """One pass: admit, compute, draw, let go. Whatever the model raises fails its replies only."""
        self._admit()
        try:
            spans = self._plan()
            if not spans:
                return
            ready = [span.slot for run, span in self._pairs(spans) if run.pending == len(span.ids)]
            drawn = self._draw(
                [self.running[slot] for slot in ready], self.model.run(spans, self.arena, ready)
            )
        except Exception as error:
            self._break_down(error)
            return
        self.counts.passes += 1
        self.counts.computed += sum(len(span.ids) for span in spans)
        for run, span in self._pairs(spans):
            run.cached += len(span.ids)
        self._take(drawn)

    def _pairs(self, spans: list[Span]) -> Iterable[tuple[Run, Span]]:
        return zip(self.running, spans, strict=True)

    def _draw(self, runs: list[Run], logits: Tensor) -> list[tuple[Run, int, float]]:
        if not runs:
            return []
        numbers = uniforms([run.stream for run in runs], [len(run.ids) for run in runs])
        tokens, logprobs = draw(logits, [run.sampling for run in runs], numbers)
        return list(zip(runs, tokens, logprobs, strict=True))

    def _take(self, drawn: list[tuple[Run, int, float]]) -> None:
        finished: list[tuple[Run, FinishReason]] = []
        for run, token, logprob in drawn:
            if math.isnan(logprob):
                self.arena.wipe(self.running.index(run))
                self.fail(AgentError("The model's logits are not numbers; are its weights?"), [run])
                continue
            reason = run.add(token, logprob, self.version)
            if reason is not None:
                finished.append((run, reason))
        self._leave([run for run, _ in finished])
        for run, reason in finished:
            run.finish(reason)

    def _break_down(self, error: Exception) -> None:
        """A pass failed: so do its replies, and what they had computed is not to be trusted."""
        failed, self.running = self.running, []
        self.arena = Arena(self.model.shape)
        for run in failed:
            run.deliver(AgentError(f"The model failed: {one_line(error)}"))

    def _admit(self) -> None:
        """Start waiting replies while there is room."""
        while self.waiting and len(self.running) < self.max_batch:
            run = self.waiting[0]
            try:
                if not self._start(run, len(self.running)):
                    return
            except Exception as error:  # no memory for it
                self.fail(AgentError(f"The engine could not start: {one_line(error)}"), [run])
                continue
            self.running.append(self.waiting.popleft())
            run.started = run.started or time.perf_counter()

    def _start(self, run: Run, slot: int) -> bool:
        """Put what is kept of a reply's conversation into a slot; False where there is no room yet."""
        kept = self.sessions.pop(run.session)
        if not self._fit(slot + 1, max(self._longest(), len(run.ids) + 1)):
            if kept is not None:
                self.sessions.put(run.session, kept)
            return False
        # The last id is always computed: its logits are what the next token is drawn from.
        run.cached = min(common_prefix(run.ids, kept.ids), len(run.ids) - 1) if kept else 0
        if kept is not None and run.cached:
            self.arena.load(slot, kept.kv, run.cached)
        return True

    def _plan(self) -> list[Span]:
        """What each slot computes next. The budget for prompts goes to those who came first."""
        while self.running and not self._fit(len(self.running), self._longest()):
            self._set_back(max(self.running, key=lambda run: run.submitted))
        budget, sizes = self.prefill_chunk, {}
        for run in sorted((run for run in self.running if run.pending > 1), key=lambda run: run.submitted):
            sizes[run] = min(run.pending, 1 + budget)
            budget -= sizes[run] - 1
        return [
            Span(slot, run.cached, run.ids[run.cached : run.cached + sizes.get(run, 1)])
            for slot, run in enumerate(self.running)
        ]

    def _set_back(self, run: Run) -> None:
        """Let a running reply wait; it keeps its tokens and is computed again."""
        self._vacate(run)
        run.cached = 0
        self.waiting.appendleft(run)
        self.counts.set_back += 1

    def _longest(self) -> int:
        return max((len(run.ids) for run in self.running), default=0)

    def _fit(self, slots: int, length: int) -> bool:
        """Make the arena this large within the bound; False where it cannot be, idle sessions or no."""
        length = self._room(length)
        wide, long = slots > self.arena.slots, length > self.arena.length
        if not wide and not long:
            return True
        # Room to grow, where there is room: resizing copies.
        roomy_slots = max(4, min(2 * slots, self.max_batch)) if wide else self.arena.slots
        roomy_length = self._room(length * 17 // 16) if long else self.arena.length
        for size in ((roomy_slots, roomy_length), (slots, roomy_length), (slots, length)):
            if size[0] * size[1] + self.sessions.tokens <= self.cache_tokens:
                return self._resize(*size)
        if slots * length > self.cache_tokens:
            return False
        while slots * length + self.sessions.tokens > self.cache_tokens:
            self._evict()
        return self._resize(slots, length)

    def _room(self, length: int) -> int:
        return round_up(self.model.rule.length(length), LENGTH_GRAIN)

    def _evict(self) -> bool:
        evicted = self.sessions.evict()
        self.counts.evicted += evicted
        return evicted

    def _resize(self, slots: int, length: int) -> bool:
        if (slots, length) != (self.arena.slots, self.arena.length):
            self.arena.resize(slots, length)
        return True

    def _leave(self, runs: Sequence[Run]) -> None:
        """Take replies out; what their sessions have computed is kept where it fits."""
        kept: list[tuple[str, Kept]] = []
        for run in runs:
            if run in self.waiting:
                self.waiting.remove(run)
            elif run in self.running:
                if run.keep and run.cached:
                    kv = self.arena.save(self.running.index(run), run.cached)
                    kept.append((run.session, Kept(run.ids[: run.cached], kv)))
                self._vacate(run)
        for session, computed in kept:
            self._keep(session, computed)

    def _keep(self, session: str, kept: Kept) -> None:
        self.sessions.pop(session)
        if self.tokens + len(kept.ids) > self.cache_tokens:
            self._shrink()
        while self.tokens + len(kept.ids) > self.cache_tokens:
            if not self._evict():
                return
        self.sessions.put(session, kept)

    def _shrink(self) -> None:
        """Give back what the arena does not need, where that is worth copying the rest."""
        slots, length = len(self.running), self._room(self._longest())
        if slots * length <= self.arena.tokens * 3 // 4:
            self._resize(slots, length)

    def _vacate(self, run: Run) -> None:
        """Free a slot; the last slot's reply moves into it."""
        slot = self.running.index(run)
        last = self.running.pop()
        if last is not run:
            self.running[slot] = last
            self.arena.move(len(self.running), slot, last.cached)
