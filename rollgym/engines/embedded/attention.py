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

Large models on CPU attend in two parts, so that sequences with a common prefix read its keys and values once.
A row at position p attends to the keys before p - p % split, in one product with all rows that have the same
prefix, and to those from there on, in its own slot; the results are merged by their log-sum-exp. The split
depends on the position only, so sharing does not change the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
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
_LANES = 32
"""Numbers that torch computes at once, at most."""
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class ReductionRule:
    """Sizes of matrix products with one order of summation."""

    gap: tuple[int, int] = (_BLOCK, _BLOCK)
    """Lengths of a block of keys to avoid: above the first and below the second number."""
    rows: int = 4
    queries: int = 4
    split: int | None = None
    """Attend in two parts, split at the last multiple of this before a row's position."""

    def cache_length(self, count: int) -> int:
        """Return the length of a KV cache for ``count`` tokens."""
        return self.length(count if self.split is None else round_up(count, self.split))

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
    prefixes: Sequence[bytes] = ()
    """Digests of the slot's first block of `ReductionRule.split` ids, the first two blocks, and so on."""


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
    rows: Tensor | None = None
    """The rows, if they are not those from ``first`` to ``last``."""

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
    experts: Tensor | None
    """Chosen experts, to be written by the model: ``[slot, position, layer, choice]``."""
    prefix_groups: Sequence[AttentionGroup] = ()
    """With `ReductionRule.split`: attention to the keys before the split; ``groups`` attend to the others."""


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
    if rule.split is not None:
        layout = _Layout(spans, parts, positions[:count], slots, kv_cache, rule)
        index = rows[2, :count], rows[1, :count]
        views, own, prefixes = kv_cache.by_position(), layout.own_groups(), layout.prefix_groups()
        return ForwardBatch(rows[0], rows[1], count, index, views, own, rule, kv_cache.experts, prefixes)
    last = len(spans)
    if last == count and slots[0] + total <= kv_cache.slots:
        last = total  # padding rows attend to the slots that follow, which saves slicing
    groups = [_group(kv_cache, rows[1, :last], rule.length(furthest + 1), 0, slots[0], shared=False)]
    for a, b, slot in parts:
        groups.append(_group(kv_cache, rows[1, a:b], rule.length(positions[b - 1] + 1), a, slot, shared=True))
    cache_index = rows[2, :count], rows[1, :count]
    views = kv_cache.by_position()
    return ForwardBatch(rows[0], rows[1], count, cache_index, views, groups, rule, kv_cache.experts)


def _group(
    kv_cache: KVCache, at: Tensor, length: int, first: int, slot: int, *, shared: bool
) -> AttentionGroup:
    seen = torch.arange(length, device=at.device) <= at[:, None]
    bias = torch.where(seen, 0.0, -torch.inf).to(kv_cache.data.dtype)
    keys, values = kv_cache.views(slot, 1 if shared else len(at), length)
    return AttentionGroup(
        first, first + len(at), shared, keys, values, bias if shared else bias[:, None, None], at
    )


class _Layout:
    """Groups of rows for attention in two parts."""

    def __init__(
        self,
        spans: Sequence[Span],
        parts: Sequence[tuple[int, int, int]],
        positions: Sequence[int],
        slots: Sequence[int],
        kv_cache: KVCache,
        rule: ReductionRule,
    ) -> None:
        assert rule.split is not None
        self.kv_cache, self.rule, self.split = kv_cache, rule, rule.split
        self.positions, self.slots = positions, slots
        self.blocks = [at // rule.split for at in positions]
        self.prefixes = {span.slot: span.prefixes for span in spans}
        self.single = [row for row, span in enumerate(spans) if len(span.ids) == 1]
        self.long = [
            [*range(first, last), row]
            for row, (first, last) in zip(
                (row for row, span in enumerate(spans) if len(span.ids) > 1),
                ((first, last) for first, last, _ in parts),
                strict=True,
            )
        ]
        """Rows of each span with more than one, by position."""

    def own_groups(self) -> list[AttentionGroup]:
        """Attention to the keys from the split on."""
        groups = [self._own(rows, shared=False) for rows in self._runs(self.single)]
        for rows in self.long:
            for _, same in itertools.groupby(rows, key=self.blocks.__getitem__):
                groups.append(self._own(list(same), shared=True))
        return groups

    def prefix_groups(self) -> list[AttentionGroup]:
        """Attention to the keys before the split: rows with the same prefix together."""
        same: dict[object, list[int]] = {}
        for row in itertools.chain(self.single, *self.long):
            if block := self.blocks[row]:
                slot = self.slots[row]
                known = self.prefixes[slot]
                key: object = known[block - 1] if len(known) >= block else (slot, block)
                same.setdefault(key, []).append(row)
        alone = sorted(rows[0] for rows in same.values() if len(rows) == 1)
        groups = [self._prefix(rows, shared=False) for rows in self._runs(alone)]
        together = [sorted(rows) for rows in same.values() if len(rows) > 1]
        return groups + [self._prefix(rows, shared=True) for rows in together]

    def _runs(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """Divide rows into those of consecutive slots in the same block."""
        run: list[int] = []
        for row in rows:
            if run and not (
                row == run[-1] + 1
                and self.slots[row] == self.slots[run[-1]] + 1
                and self.blocks[row] == self.blocks[run[-1]]
            ):
                yield run
                run = []
            run.append(row)
        if run:
            yield run

    def _own(self, rows: Sequence[int], *, shared: bool) -> AttentionGroup:
        start = self.blocks[rows[0]] * self.split
        furthest = max(self.positions[row] for row in rows)
        end = start + min(self.split, self.rule.length(furthest - start + 1))
        keys, at = torch.arange(start, end), self._at(rows)
        return self._group(rows, start, end, keys <= at[:, None], at, shared)

    def _prefix(self, rows: Sequence[int], *, shared: bool) -> AttentionGroup:
        end = self.blocks[rows[0]] * self.split
        length, at = self.rule.length(end), self._at(rows)
        seen = (torch.arange(length) < end).expand(len(rows), -1)
        return self._group(rows, 0, length, seen, at, shared)

    def _at(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor([self.positions[row] for row in rows])

    def _group(
        self, rows: Sequence[int], start: int, end: int, seen: Tensor, at: Tensor, shared: bool
    ) -> AttentionGroup:
        """Rows that attend to the keys of some positions, each in its slot or all in that of the first."""
        bias = torch.where(seen, 0.0, -torch.inf).to(self.kv_cache.data.dtype)
        keys, values = self.kv_cache.views(self.slots[rows[0]], 1 if shared else len(rows), end, start)
        first, last = rows[0], rows[-1] + 1
        index = None if last - first == len(rows) else torch.tensor(rows)
        bias = bias if shared else bias[:, None, None]
        return AttentionGroup(first, last, shared, keys, values, bias, at, rows=index)


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
    if batch.rule.split is not None:
        return _attend_in_two_parts(batch, layer, queries, scale)
    if batch.groups[0].last == len(queries):
        return _own(batch.groups[0], layer, queries, scale, batch.rule, features)
    out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    for group in batch.groups:
        part = queries[group.first : group.last]
        attention = _shared if group.shared else _own
        out[group.first : group.last] = attention(group, layer, part, scale, batch.rule, features)
    return out


def _attend_in_two_parts(batch: ForwardBatch, layer: int, queries: Tensor, scale: float) -> Tensor:
    """Attend to the keys from the split on and to those before it, and merge the results."""
    whole = batch.groups[0]
    if not batch.prefix_groups and whole.rows is None and whole.last - whole.first == len(queries):
        return _with_lse(whole, layer, queries, scale, batch.rule)[0]
    rows, heads, per_head, _ = queries.shape
    width = round_up(heads * per_head, _LANES)
    own = torch.empty_like(queries, memory_format=torch.contiguous_format)
    own[batch.count :] = 0
    own_lse = torch.zeros(rows, width, device=queries.device)
    _fill(batch, batch.groups, layer, queries, scale, own, own_lse)
    if not batch.prefix_groups:
        return own
    prefix = queries.new_zeros(queries.shape)
    prefix_lse = torch.full((rows, width), -torch.inf, device=queries.device)
    _fill(batch, batch.prefix_groups, layer, queries, scale, prefix, prefix_lse)
    # All vectors of `exp` are full: the last numbers of a tensor would be rounded in another way.
    most = torch.maximum(own_lse, prefix_lse)
    own_weight, prefix_weight = (own_lse - most).exp_(), (prefix_lse - most).exp_()
    total = own_weight + prefix_weight
    shape = rows, heads, per_head, 1
    for out, weight in ((own, own_weight), (prefix, prefix_weight)):
        out.mul_((weight / total)[:, : heads * per_head].reshape(shape))
    return own.add_(prefix)


def _fill(
    batch: ForwardBatch,
    groups: Sequence[AttentionGroup],
    layer: int,
    queries: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write the attention of groups and its log-sum-exp to their rows."""
    count = queries.shape[1] * queries.shape[2]
    for group in groups:
        if group.rows is None:
            first, size = group.first, group.last - group.first
            found, its_lse = _with_lse(group, layer, queries.narrow(0, first, size), scale, batch.rule)
            out[first : group.last] = found
            lse[first : group.last, :count] = its_lse
        else:
            part = queries.index_select(0, group.rows)
            found, its_lse = _with_lse(group, layer, part, scale, batch.rule)
            out.index_copy_(0, group.rows, found)
            lse[group.rows, :count] = its_lse


def _with_lse(
    group: AttentionGroup, layer: int, queries: Tensor, scale: float, rule: ReductionRule
) -> tuple[Tensor, Tensor]:
    """Return attention and the log-sum-exp of its scores, ``[row, query head]``."""
    rows, heads, per_head, dim = queries.shape
    keys, values = group.keys[layer], group.values[layer]
    bias = group.bias
    if group.shared:
        queries = queries.transpose(0, 1).reshape(1, heads, rows * per_head, dim)
        if per_head > 1:
            if (None, per_head) not in group.local:
                group.local[None, per_head] = bias.repeat_interleave(per_head, 0)
            bias = group.local[None, per_head]
        if more := -queries.shape[2] % rule.queries:
            queries, bias = F.pad(queries, (0, 0, 0, more)), F.pad(bias, (0, 0, 0, more))
        bias = bias[None, None]
    else:
        queries = _widen(queries, -per_head % rule.queries)
    out, lse = _flash_attention(queries, keys, values, 0.0, False, attn_mask=bias, scale=scale)
    if not group.shared:
        return out.narrow(2, 0, per_head), lse.narrow(2, 0, per_head).reshape(rows, -1)
    out = out.narrow(2, 0, rows * per_head).reshape(heads, rows, per_head, dim).transpose(0, 1)
    lse = lse.narrow(2, 0, rows * per_head).reshape(heads, rows, per_head).transpose(0, 1)
    return out, lse.reshape(rows, -1)


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
