"""The packed batch of one forward pass, and attention over the KV cache.

A row is one token of one sequence, prefilled or just sampled. Linear layers treat all rows alike; attention
works in groups: one for the last row of every running sequence (a view of the whole KV cache), and one for
each sequence with more than one row.

With a `ReductionRule`, a row's result has the same bits in any batch: alone, with others, or as part of a
long prompt. The kernels of a matrix product choose their order of summation by the size of the product, so a
rule restricts the sizes to those with one order (measured, see docs/engines.md; `batch_invariance` finds the
rule for a machine):

* the number of rows is padded to a multiple of 4: fewer rows use another kernel;
* so is the number of queries per key head;
* keys are padded to a multiple of 16 and masked, which adds exact zeros at the end. Lengths in a certain gap
  are split in two at an offset that depends on the length, so they are padded to the end of the gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from rollgym.engines.embedded.features import PLAIN, Features, eager_attention
from rollgym.engines.embedded.kv_cache import KVCache, round_up

__all__ = [
    "AttentionGroup",
    "ForwardBatch",
    "ReductionRule",
    "Span",
    "attend",
    "make_forward_batch",
    "write_kv",
]

_STEP = 16
_BLOCK = 512
"""Keys per block of the attention kernel."""


@dataclass(frozen=True, slots=True)
class ReductionRule:
    """Sizes of matrix products with one order of summation."""

    gap: tuple[int, int] = (_BLOCK, _BLOCK)
    """Lengths of a block of keys to avoid: above the first and below the second number."""
    rows: int = 4
    queries: int = 4

    def length(self, count: int) -> int:
        """Return the padded number of keys."""
        count = round_up(count, _STEP)
        rest = count % _BLOCK
        return count - rest + self.gap[1] if self.gap[0] < rest < self.gap[1] else count


@dataclass(frozen=True, slots=True)
class Span:
    """Ids that one slot computes in a pass, starting at a position."""

    slot: int
    start: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows that attend in one call, each to its own slot or all to the same slot."""

    first: int
    last: int
    shared: bool
    keys: Sequence[Tensor]
    """Of each layer, ``[slot, head, position]``; views of the KV cache."""
    values: Sequence[Tensor]
    bias: Tensor
    """0 where a row may attend, minus infinity elsewhere."""
    at: Tensor
    """[row] positions."""
    local: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)
    """The bias by window and chunk, for layers with local attention."""

    def bias_of(self, features: Features) -> Tensor:
        """Return the bias for a layer with a window or chunks."""
        limits = features.window, features.chunk
        if limits == (None, None):
            return self.bias
        if limits not in self.local:
            keys = torch.arange(self.bias.shape[-1], device=self.at.device)
            seen = features.sees(self.at, keys).view(self.bias.shape)
            self.local[limits] = torch.where(seen, 0.0, -torch.inf).to(self.bias.dtype)
        return self.local[limits]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The packed tokens of a pass: first the last token of each span, then the others, then padding."""

    ids: Tensor
    positions: Tensor
    count: int
    """Number of rows without padding."""
    cache_index: tuple[Tensor, Tensor]
    """(slot, position) of each row."""
    layers: Sequence[Tensor]
    """The layers of the KV cache, ``[slot, position, key or value, head]``."""
    groups: Sequence[AttentionGroup]
    rule: ReductionRule


def make_forward_batch(spans: Sequence[Span], kv_cache: KVCache, rule: ReductionRule) -> ForwardBatch:
    """Pack spans of consecutive slots into a batch."""
    ids = [span.ids[-1] for span in spans]
    positions = [span.start + len(span.ids) - 1 for span in spans]
    slots = [span.slot for span in spans]
    parts: list[tuple[int, int, int]] = []
    for span in spans:
        if len(span.ids) > 1:
            parts.append((len(ids), len(ids) + len(span.ids) - 1, span.slot))
            ids.extend(span.ids[:-1])
            positions.extend(range(span.start, span.start + len(span.ids) - 1))
            slots.extend([span.slot] * (len(span.ids) - 1))
    count, furthest = len(ids), max(positions[: len(spans)])
    total = round_up(count, rule.rows)
    padding = [0] * (total - count)
    rows = torch.tensor([ids + padding, positions + padding, slots + padding], device=kv_cache.data.device)
    last = len(spans)
    if last == count and slots[0] + total <= kv_cache.slots:
        last = total  # padding rows attend to the slots that follow, which saves slicing
    groups = [_group(kv_cache, rows[1, :last], rule.length(furthest + 1), 0, slots[0], shared=False)]
    for a, b, slot in parts:
        groups.append(_group(kv_cache, rows[1, a:b], rule.length(positions[b - 1] + 1), a, slot, shared=True))
    cache_index = rows[2, :count], rows[1, :count]
    return ForwardBatch(rows[0], rows[1], count, cache_index, kv_cache.by_position(), groups, rule)


def _group(
    kv_cache: KVCache, at: Tensor, length: int, first: int, slot: int, *, shared: bool
) -> AttentionGroup:
    seen = torch.arange(length, device=at.device) <= at[:, None]
    bias = torch.where(seen, 0.0, -torch.inf).to(kv_cache.data.dtype)
    keys, values = kv_cache.views(slot, 1 if shared else len(at), length)
    return AttentionGroup(
        first, first + len(at), shared, keys, values, bias if shared else bias[:, None, None], at
    )


def write_kv(batch: ForwardBatch, layer: int, kv: Tensor) -> None:
    """Write keys and values, ``kv[row, key or value, head]``, into a layer of the KV cache."""
    into = batch.layers[layer]
    if into.shape[3:] != kv.shape[2:]:  # a layer with fewer or smaller heads than others
        into = into[:, :, :, : kv.shape[2], : kv.shape[3]]
    into.index_put_(batch.cache_index, kv.narrow(0, 0, batch.count))


def attend(
    batch: ForwardBatch, layer: int, queries: Tensor, scale: float, features: Features = PLAIN
) -> Tensor:
    """Return the attention output of queries ``[row, kv head, query of that head]``; padding: undefined."""
    if batch.groups[0].last == len(queries):
        return _own(batch.groups[0], layer, queries, scale, batch.rule, features)
    out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    for group in batch.groups:
        part = queries[group.first : group.last]
        attention = _shared if group.shared else _own
        out[group.first : group.last] = attention(group, layer, part, scale, batch.rule, features)
    return out


def _keys_values(group: AttentionGroup, layer: int, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a layer, sliced to the number and size of its heads."""
    keys, values = group.keys[layer], group.values[layer]
    _, heads, _, dim = queries.shape
    if keys.shape[1] == heads and keys.shape[3] == dim:
        return keys, values
    return keys[:, :heads, :, :dim], values[:, :heads, :, :dim]


def _own(
    group: AttentionGroup, layer: int, queries: Tensor, scale: float, rule: ReductionRule, features: Features
) -> Tensor:
    """Each row attends to its own slot."""
    count = queries.shape[2]
    keys, values = _keys_values(group, layer, queries)
    if not features.plain_softmax:
        return _eager(queries, keys, values, group.bias_of(features), scale, features)
    padded = _widen(queries, -count % rule.queries)
    out = F.scaled_dot_product_attention(padded, keys, values, group.bias_of(features), scale=scale)
    return out if padded is queries else out.narrow(2, 0, count)


def _eager(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float, features: Features
) -> Tensor:
    """Attention with soft-capped scores or sinks, to one slot per row or one for all rows."""
    rows, heads, per_head, dim = queries.shape
    single = queries.reshape(rows, heads * per_head, 1, dim)
    if len(keys) != rows:
        keys, values = keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)
    seen = (bias == 0).view(rows, 1, 1, -1)
    return eager_attention(single, keys, values, seen, scale, features).view(rows, heads, per_head, dim)


def _widen(queries: Tensor, more: int) -> Tensor:
    """Pad the queries: with the following memory if it is long enough, else with zeros."""
    if not more:
        return queries
    rows, heads, count, dim = queries.shape
    row, head, query, step = queries.stride()
    room = row - (heads - 1) * head - (count - 1) * query - dim
    if query == dim and step == 1 and room >= more * dim:
        return queries.as_strided((rows, heads, count + more, dim), (row, head, query, 1))
    return F.pad(queries, (0, 0, 0, more))


def _shared(
    group: AttentionGroup, layer: int, queries: Tensor, scale: float, rule: ReductionRule, features: Features
) -> Tensor:
    """All rows attend to the keys of one slot, as queries of one product."""
    count, heads, per_head, dim = queries.shape
    keys, values = _keys_values(group, layer, queries)
    bias = group.bias_of(features)
    if not features.plain_softmax:
        return _eager(queries, keys, values, bias, scale, features)
    together = queries.transpose(0, 1).reshape(1, heads, count * per_head, dim)
    bias = bias if per_head == 1 else bias.repeat_interleave(per_head, 0)
    more = -len(bias) % rule.queries
    if more:
        together, bias = F.pad(together, (0, 0, 0, more)), F.pad(bias, (0, 0, 0, more))
    out = F.scaled_dot_product_attention(together, keys, values, bias[None, None], scale=scale)
    return out.narrow(2, 0, count * per_head).reshape(heads, count, per_head, dim).transpose(0, 1)
