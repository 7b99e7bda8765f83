"""One pass through the model as rows: what each row is, and attention over the arena.

A row is one token of one sequence, whether it is being prefilled or was just sampled. Linear layers do not
care; attention does, and works in groups: one for the last row of every running sequence (a view of the
whole arena), and one for each sequence that has more rows than one.

With a `Rule`, a row's result has the same bits in whatever company it is computed: alone, in a batch, or
as part of a long prompt. The kernels behind a matrix product pick the order in which they add by the size
of the product, so a rule keeps to sizes that are added in one order (measured, see docs/engine.md; `probe`
finds the rule for the machine at hand):

* the number of rows is padded to a multiple of 4: fewer rows use another kernel;
* so is the number of queries that one head of keys answers;
* keys are padded to a multiple of 16 and masked, which adds exact zeros at the end. Lengths in a certain
  gap are split in two at a place that depends on the length, so they are padded to the gap's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from rollgym.engines.embedded.cache import Arena, round_up
from rollgym.engines.embedded.features import PLAIN, Features, weigh

__all__ = ["Group", "Rows", "Rule", "Span", "attend", "lay_out", "store"]

_STEP = 16
_BLOCK = 512
"""The attention kernel works through this many keys at a time."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Sizes that are added up in one order."""

    gap: tuple[int, int] = (_BLOCK, _BLOCK)
    """Lengths of a block of keys to be avoided: above the first and below the second number."""
    rows: int = 4
    queries: int = 4

    def length(self, count: int) -> int:
        """How many keys to work through for this many."""
        count = round_up(count, _STEP)
        rest = count % _BLOCK
        return count - rest + self.gap[1] if self.gap[0] < rest < self.gap[1] else count


@dataclass(frozen=True, slots=True)
class Span:
    """What one slot computes in a pass: these ids, the first of them at this position."""

    slot: int
    start: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend in one call, each to the keys of a slot of its own or all to the same."""

    first: int
    last: int
    shared: bool
    keys: Sequence[Tensor]
    """Of each layer, ``[slot, head, position]``; views of the arena."""
    values: Sequence[Tensor]
    bias: Tensor
    """0 where a row may look, minus infinity where it may not."""
    at: Tensor
    """[row] positions."""
    local: dict[tuple[int | None, int | None], Tensor] = field(default_factory=dict)
    """The same by window and chunk, for layers that do not look all the way back."""

    def bias_of(self, features: Features) -> Tensor:
        """Where rows may look in a layer with a window or chunks."""
        limits = features.window, features.chunk
        if limits == (None, None):
            return self.bias
        if limits not in self.local:
            keys = torch.arange(self.bias.shape[-1], device=self.at.device)
            seen = features.sees(self.at, keys).view(self.bias.shape)
            self.local[limits] = torch.where(seen, 0.0, -torch.inf).to(self.bias.dtype)
        return self.local[limits]


@dataclass(frozen=True, slots=True)
class Rows:
    """One pass. The first rows are the last token of each span, in order; padding comes at the end."""

    ids: Tensor
    positions: Tensor
    count: int
    """Rows that are real."""
    places: tuple[Tensor, Tensor]
    """(slot, position) of each real row."""
    layers: Sequence[Tensor]
    """The arena's layers, ``[slot, position, key or value, head]``."""
    groups: Sequence[Group]
    rule: Rule


def lay_out(spans: Sequence[Span], arena: Arena, rule: Rule) -> Rows:
    """Arrange spans of consecutive slots as rows."""
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
    rows = torch.tensor([ids + padding, positions + padding, slots + padding], device=arena.data.device)
    last = len(spans)
    if last == count and slots[0] + total <= arena.slots:
        last = total  # padding rows look at slots that happen to follow, which saves taking them out
    groups = [_group(arena, rows[1, :last], rule.length(furthest + 1), 0, slots[0], shared=False)]
    for a, b, slot in parts:
        groups.append(_group(arena, rows[1, a:b], rule.length(positions[b - 1] + 1), a, slot, shared=True))
    places = rows[2, :count], rows[1, :count]
    return Rows(rows[0], rows[1], count, places, arena.by_place(), groups, rule)


def _group(arena: Arena, at: Tensor, length: int, first: int, slot: int, *, shared: bool) -> Group:
    seen = torch.arange(length, device=at.device) <= at[:, None]
    bias = torch.where(seen, 0.0, -torch.inf).to(arena.data.dtype)
    keys, values = arena.views(slot, 1 if shared else len(at), length)
    return Group(first, first + len(at), shared, keys, values, bias if shared else bias[:, None, None], at)


def store(rows: Rows, layer: int, kv: Tensor) -> None:
    """Write the rows' keys and values, ``kv[row, key or value, head]``, into a layer of the arena."""
    into = rows.layers[layer]
    if into.shape[3:] != kv.shape[2:]:  # a layer with fewer or smaller heads than others
        into = into[:, :, :, : kv.shape[2], : kv.shape[3]]
    into.index_put_(rows.places, kv.narrow(0, 0, rows.count))


def attend(rows: Rows, layer: int, queries: Tensor, scale: float, features: Features = PLAIN) -> Tensor:
    """What each row's queries, ``[row, kv head, query of that head]``, find. Padding rows find anything."""
    if rows.groups[0].last == len(queries):
        return _own(rows.groups[0], layer, queries, scale, rows.rule, features)
    found = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    for group in rows.groups:
        part = queries[group.first : group.last]
        ask = _shared if group.shared else _own
        found[group.first : group.last] = ask(group, layer, part, scale, rows.rule, features)
    return found


def _held(group: Group, layer: int, queries: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of a layer, as many and as large heads as its queries ask for."""
    keys, values = group.keys[layer], group.values[layer]
    _, heads, _, dim = queries.shape
    if keys.shape[1] == heads and keys.shape[3] == dim:
        return keys, values
    return keys[:, :heads, :, :dim], values[:, :heads, :, :dim]


def _own(group: Group, layer: int, queries: Tensor, scale: float, rule: Rule, features: Features) -> Tensor:
    """Each row asks the keys of its own slot."""
    count = queries.shape[2]
    keys, values = _held(group, layer, queries)
    if not features.plain_softmax:
        return _weighed(queries, keys, values, group.bias_of(features), scale, features)
    padded = _widen(queries, -count % rule.queries)
    found = F.scaled_dot_product_attention(padded, keys, values, group.bias_of(features), scale=scale)
    return found if padded is queries else found.narrow(2, 0, count)


def _weighed(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float, features: Features
) -> Tensor:
    """Each row asks, or all rows ask the same keys: with a cap on the scores or with sinks."""
    rows, heads, per_head, dim = queries.shape
    single = queries.reshape(rows, heads * per_head, 1, dim)
    if len(keys) != rows:
        keys, values = keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)
    seen = (bias == 0).view(rows, 1, 1, -1)
    return weigh(single, keys, values, seen, scale, features).view(rows, heads, per_head, dim)


def _widen(queries: Tensor, more: int) -> Tensor:
    """Add queries whose answers nobody reads: what follows in memory where that suffices, else zeros."""
    if not more:
        return queries
    rows, heads, count, dim = queries.shape
    row, head, query, step = queries.stride()
    room = row - (heads - 1) * head - (count - 1) * query - dim
    if query == dim and step == 1 and room >= more * dim:
        return queries.as_strided((rows, heads, count + more, dim), (row, head, query, 1))
    return F.pad(queries, (0, 0, 0, more))


def _shared(
    group: Group, layer: int, queries: Tensor, scale: float, rule: Rule, features: Features
) -> Tensor:
    """All rows ask the keys of one slot, as queries of one product."""
    count, heads, per_head, dim = queries.shape
    keys, values = _held(group, layer, queries)
    bias = group.bias_of(features)
    if not features.plain_softmax:
        return _weighed(queries, keys, values, bias, scale, features)
    together = queries.transpose(0, 1).reshape(1, heads, count * per_head, dim)
    bias = bias if per_head == 1 else bias.repeat_interleave(per_head, 0)
    more = -len(bias) % rule.queries
    if more:
        together, bias = F.pad(together, (0, 0, 0, more)), F.pad(bias, (0, 0, 0, more))
    found = F.scaled_dot_product_attention(together, keys, values, bias[None, None], scale=scale)
    return found.narrow(2, 0, count * per_head).reshape(heads, count, per_head, dim).transpose(0, 1)
