"""Batch invariance: finds the `ReductionRule` under which a token's result does not depend on its batch.

Kernels differ between CPUs and libraries, so the rule is measured on this machine. Rules are tried, cheapest
first, and results compared bit for bit: attention alone at many lengths, then the model with the same tokens
one by one, in a batch, and in one prefill.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rollgym.engines.embedded.attention import ReductionRule, Span, attend, make_forward_batch
from rollgym.engines.embedded.experts import pad_experts
from rollgym.engines.embedded.kv_cache import KVCache, KVShape
from rollgym.engines.embedded.model import Model

__all__ = ["make_batch_invariant"]

_GAPS = ((512, 512), (384, 512), (256, 512), (192, 384), (0, 512))
_ROWS = (4, 8, 16, 32)
_LONGEST = 1088
_TOKENS = 3
_cache: dict[tuple[object, ...], ReductionRule | None] = {}
log = logging.getLogger(__name__)


def make_batch_invariant(model: Model, most_rows: int) -> None:
    """Set the cheapest rule that makes the model batch invariant; if none does, compute token by token."""
    config = model.module.config.to_json_string()
    kernels = model.fused, model.packed, torch.get_num_threads()
    key = (config, model.shape, model.context, most_rows, *kernels)
    if key not in _cache:  # the same sizes give the same rule within a process
        _cache[key] = _find_rule(model, most_rows)
    rule = _cache[key]
    if rule is None and model.packed:
        model.unpack()
        make_batch_invariant(model, most_rows)
        return
    model.rule = rule or ReductionRule(rows=1, queries=1, split=model.rule.split)
    pad_experts(model.module, model.rule.rows)
    model.batch_invariant, model.one_token_at_a_time = True, rule is None
    if rule is None:
        log.warning(
            "on this machine a token's logits depend on the rest of its batch: computing one token at a "
            "time. Pass deterministic=False for speed."
        )


def _find_rule(model: Model, most_rows: int) -> ReductionRule | None:
    split = model.rule.split
    gap = next((gap for gap in _GAPS if _attention_holds(model, ReductionRule(gap, split=split))), None)
    if gap is None:
        return None
    for rows in (1, *_ROWS) if model.packed else _ROWS:
        model.rule = ReductionRule(gap, rows, split=split)
        pad_experts(model.module, rows)
        if _model_holds(model, most_rows):
            return model.rule
    return None


@torch.inference_mode()
def _attention_holds(model: Model, rule: ReductionRule) -> bool:
    """Return True if attention gives the same bits alone, with other sequences, and in prompt chunks."""
    longest = min(model.context, _LONGEST)
    shape = replace(model.shape, layers=1)
    noise = torch.randn(longest, shape.heads, model.queries, shape.dim, generator=_generator(0))
    queries = noise.to(shape.device, shape.dtype)
    chunks = [(first, first + size) for first in (0, 183, 290, 500, 700) for size in (2, 7, 61, 300)]
    chunks = [(first, last) for first, last in chunks if last <= longest]
    at = sorted({p for first, last in chunks for p in (first, (first + last) // 2, last - 1)})
    kv_cache = _noise(shape, len(at) + 1, rule.cache_length(longest), same=True)
    alone = {p: _look(kv_cache, rule, [Span(0, p, [0])], queries[p : p + 1])[0] for p in at}
    return all(
        torch.equal(row, alone[p])
        for p, row in itertools.chain(
            *(
                _beside(kv_cache, rule, [p for p in at if p <= end], end, queries)
                for end in range(47, longest, 48)
            ),
            *(_chunk(kv_cache, rule, first, last, queries) for first, last in chunks),
        )
        if p in alone
    )


def _beside(
    kv_cache: KVCache, rule: ReductionRule, at: Sequence[int], end: int, queries: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield attention results of sequences in a batch with a longer one."""
    # All slots have the same content, so the prefixes before a split are shared.
    prefixes = [bytes([block]) for block in range(end // (rule.split or end))]
    spans = [Span(slot, p, [0], prefixes) for slot, p in enumerate([*at, end])]
    yield from zip(at, _look(kv_cache, rule, spans, queries[[*at, end]]), strict=False)


def _chunk(
    kv_cache: KVCache, rule: ReductionRule, first: int, last: int, queries: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield attention results of a prompt chunk; its last row comes first in a batch."""
    order = [last - 1, *range(first, last - 1)]
    yield from zip(
        order, _look(kv_cache, rule, [Span(0, first, [0] * len(order))], queries[order]), strict=True
    )


def _look(kv_cache: KVCache, rule: ReductionRule, spans: Sequence[Span], queries: Tensor) -> Tensor:
    return attend(
        make_forward_batch(spans, kv_cache, replace(rule, rows=1)), 0, queries, queries.shape[-1] ** -0.5
    )


@torch.inference_mode()
def _model_holds(model: Model, most_rows: int) -> bool:
    """Return True if the model gives the same logits, keys and values for any batch composition."""
    longest = min(model.context, _LONGEST)
    starts = sorted({min(at, max(0, longest - _TOKENS)) for at in (0, 13, 60, 300, 1000)})
    ids = [[(17 * slot + 5 * n) % model.vocabulary for n in range(_TOKENS)] for slot in range(len(starts))]
    spans = [Span(slot, start, ids[slot]) for slot, start in enumerate(starts)]
    filler = Span(len(spans), 0, [n % model.vocabulary for n in range(min(most_rows, longest))])
    noise = _noise(model.shape, len(spans) + 1, model.rule.cache_length(longest), same=False)
    alone = _run(model, noise, [[one] for span in spans for one in _single(span)])
    steps = _run(model, noise, [list(step) for step in zip(*map(_single, spans), strict=True)])
    whole = _run(model, noise, [[*spans, filler]])
    return _same(alone, steps) and _same(alone, whole)


def _single(span: Span) -> list[Span]:
    return [Span(span.slot, span.start + n, [token]) for n, token in enumerate(span.ids)]


def _noise(shape: KVShape, slots: int, length: int, *, same: bool) -> KVCache:
    kv_cache = KVCache(shape, slots, length)
    size = (shape.layers, 2, 1 if same else slots, shape.heads, length, shape.dim)
    kv_cache.data.copy_(torch.randn(size, generator=_generator(1)))
    return kv_cache


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _run(model: Model, noise: KVCache, passes: Sequence[Sequence[Span]]) -> tuple[dict[int, Tensor], Tensor]:
    """Return the logits after each slot's last token, and the KV cache of all slots but the filler's."""
    kv_cache = KVCache(model.shape)
    kv_cache.data = noise.data.clone()
    last: dict[int, Tensor] = {}
    for spans in passes:
        logits = model.forward(spans, kv_cache, range(len(spans)))
        last.update({span.slot: row for span, row in zip(spans, logits, strict=True)})
    return last, kv_cache.data[:, :, :-1]


def _same(a: tuple[dict[int, Tensor], Tensor], b: tuple[dict[int, Tensor], Tensor]) -> bool:
    return torch.equal(a[1], b[1]) and all(torch.equal(row, b[0][slot]) for slot, row in a[0].items())
