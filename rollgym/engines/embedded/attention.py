"""One pass through the model as rows: what each row is, and attention over the arena.

A row is one token of one sequence, whether it is being prefilled or was just sampled. Linear layers do not
care; attention does, and works in groups: one for the last row of every running sequence (a view of the
whole arena), and one for each sequence that has more rows than one.

With ``exact`` set, a row's result has the same bits in whatever company it is computed. Three things make
it so on CPU (measured, see docs/engine.md; `probe` checks them again on the machine at hand):

* each row is a batch entry of its own, with exactly two query heads per call: the kernels behind one, two
  and more rows add up in different orders, and an odd number leaves a thread's scratch memory unaligned;
* lengths are padded to a multiple of 16 and masked: at such lengths, more padding changes nothing;
* the number of rows is padded to a multiple of 4 or more, as products of fewer rows use another kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rollgym.engines.embedded.cache import Arena, round_up

__all__ = ["LENGTH_STEP", "Group", "Rows", "Span", "attend", "lay_out", "store"]

LENGTH_STEP = 16


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
    """Of each layer, ``[row, head, position]``; views of the arena."""
    values: Sequence[Tensor]
    bias: Tensor
    """0 where a row may look, minus infinity where it may not."""


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
    exact: bool


def lay_out(spans: Sequence[Span], arena: Arena, multiple: int, *, exact: bool) -> Rows:
    """Arrange spans of consecutive slots as rows, padded to a multiple."""
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
    count = len(ids)
    total = round_up(count, multiple)
    padding = [0] * (total - count)
    rows = torch.tensor([ids + padding, positions + padding, slots + padding], device=arena.data.device)
    last = len(spans)
    if last == count and slots[0] + total <= arena.slots:
        last = total  # padding rows look at slots that happen to follow, which saves taking them out
    groups = [_group(arena, rows[1, :last], max(positions[: len(spans)]), 0, slots[0], shared=False)]
    groups += [_group(arena, rows[1, a:b], positions[b - 1], a, slot, shared=True) for a, b, slot in parts]
    places = rows[2, :count], rows[1, :count]
    return Rows(rows[0], rows[1], count, places, arena.by_place(), groups, exact)


def _group(arena: Arena, at: Tensor, furthest: int, first: int, slot: int, *, shared: bool) -> Group:
    count, length = len(at), round_up(furthest + 1, LENGTH_STEP)
    seen = torch.arange(length, device=at.device) <= at[:, None]
    bias = torch.where(seen, 0.0, -torch.inf).to(arena.data.dtype)[:, None, None, :]
    part = arena.data[:, :, slot : slot + (1 if shared else count), :, :length]
    keys, values = part.expand(-1, -1, count, -1, -1, -1).unbind(1)
    return Group(first, first + count, shared, keys.unbind(0), values.unbind(0), bias)


def store(rows: Rows, layer: int, kv: Tensor) -> None:
    """Write the rows' keys and values, ``kv[row, key or value, head]``, into a layer of the arena."""
    rows.layers[layer].index_put_(rows.places, kv.narrow(0, 0, rows.count))


def attend(rows: Rows, layer: int, queries: Tensor, scale: float) -> Tensor:
    """What each row's queries, ``[row, kv head, query of that head]``, find. Padding rows find anything."""
    if rows.groups[0].last == len(queries):
        return _attend_group(rows.groups[0], layer, queries, scale, rows.exact)
    found = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    for group in rows.groups:
        part = queries[group.first : group.last]
        found[group.first : group.last] = _attend_group(group, layer, part, scale, rows.exact)
    return found


def _attend_group(group: Group, layer: int, queries: Tensor, scale: float, exact: bool) -> Tensor:
    keys, values, bias = group.keys[layer], group.values[layer], group.bias
    count, heads, per_head, dim = queries.shape
    if group.shared and not exact:
        together = queries.transpose(0, 1).reshape(1, heads, count * per_head, dim)
        bias = bias.expand(-1, -1, per_head, -1).reshape(1, 1, count * per_head, -1)
        found = F.scaled_dot_product_attention(together, keys[:1], values[:1], bias, scale=scale)
        return found.view(heads, count, per_head, dim).transpose(0, 1)
    if not exact or per_head == 2:
        return F.scaled_dot_product_attention(queries, keys, values, bias, scale=scale)
    return _in_pairs(queries, keys, values, bias, scale)


def _in_pairs(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    found = []
    for first in range(0, queries.shape[2], 2):
        pair = queries[:, :, first : first + 2]
        size = pair.shape[2]
        pair = F.scaled_dot_product_attention(
            pair if size == 2 else pair.expand(-1, -1, 2, -1), keys, values, bias, scale=scale
        )
        found.append(pair[:, :, :size])
    return found[0] if len(found) == 1 else torch.cat(found, 2)
