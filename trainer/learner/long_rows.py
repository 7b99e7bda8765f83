"""Long rows: the tokens of a micro-batch in pieces, so that activations of one piece exist at a time.

The forward pass computes piece after piece without activations and keeps the keys and values of all layers,
which later pieces attend to. The backward pass computes the pieces again, last first: each adds the gradients
of the keys and values that it has read, so that those of a piece are complete when its turn comes. The
gradient is that of one pass; a piece costs a second forward pass, and its attention a third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rollgym.engines.embedded.features import Features
from rollgym.trainer.data.packing import MIN_SAVED, Packing
from rollgym.trainer.data.sequences import IntArray
from rollgym.trainer.learner.block_attention import Block, attend_blocks, plan_blocks
from rollgym.trainer.learner.packed_attention import (
    attend_row,
    compute_dtype,
    in_blocks,
)

Tokens = slice | Tensor
MAX_SCORES = 2**22
"""Scores of heads, queries and keys that attention to earlier pieces holds at once: 16 MB in float32."""
MIN_PIECE = 6
"""Fewest tokens of a piece: the rounding of sums over many smaller ones would show in gradients."""


def exceeds(packing: Packing, max_tokens: int) -> bool:
    """Return whether a micro-batch is computed in pieces of at most so many tokens.

    Rows that fit one by one may exceed the number together, if sharing their prefixes would save too little.
    """
    return max(packing.sizes) > max_tokens or len(packing.ids) * (1 - MIN_SAVED) > max_tokens


class KeyValues:
    """Keys and values of all layers for the tokens computed so far, and their gradients from later ones."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._states: dict[int, tuple[Tensor, Tensor]] = {}
        self._grads: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Keep the keys and values of some tokens: ``[1, head, token, dim]``."""
        if layer not in self._states:
            self._states[layer] = (self._empty(key), self._empty(value))
        for whole, part in zip(self._states[layer], (key, value), strict=True):
            whole[:, :, start : start + part.shape[2]] = part

    def read(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer before a token."""
        key, value = self._states[layer]
        return key[:, :, :stop], value[:, :, :stop]

    def grads(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the gradients so far, to be added to, in float32 whatever the compute dtype."""
        if layer not in self._grads:
            key, value = self._states[layer]
            self._grads[layer] = (
                torch.zeros_like(key, dtype=torch.float32),
                torch.zeros_like(value, dtype=torch.float32),
            )
        return self._grads[layer]

    def _empty(self, part: Tensor) -> Tensor:
        return part.new_empty(*part.shape[:2], self._num_tokens, part.shape[3])


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Queries of one row in a piece, and the keys of that row up to the last of them."""

    queries: Tokens
    """Indices in the piece."""
    keys: Tokens
    """Indices in the micro-batch."""
    at: IntArray | None
    """Positions of the queries in the row, on the host; None if they are the row so far."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some tokens of a packing for a model; passed in place of transformers' cumulative lengths of rows."""

    start: int
    stop: int
    ids: Tensor
    positions: Tensor
    spots: Tensor
    """Indices in the piece of the states that predict action tokens."""
    actions: Tensor
    """Indices of these action tokens among all."""
    computed_wanted: Tensor
    """Indices in the piece of the tokens whose last states are read, or of any one."""
    segments: Sequence[Segment]
    last_segments: Sequence[Segment]
    """Those of the last layer: of the wanted tokens alone."""
    blocks: Sequence[Block] | None
    """Blocks of queries, where attention by plain matrix products is faster."""
    last_blocks: Sequence[Block] | None
    longest: int
    """Tokens of the longest row."""
    cache: KeyValues

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        last: bool,
        scale: float,
        features: Features,
    ) -> Tensor:
        """Compute attention of the piece's queries in a layer: ``[1, token, head, dim]``."""
        dtype = compute_dtype(query)
        apply: Any = _PieceAttention.apply
        states = (query.to(dtype), key.to(dtype), value.to(dtype), features.sinks)
        result: Tensor = apply(*states, self, layer, last, scale, replace(features, sinks=None))
        return result

    def parts(self, num_heads: int, last: bool, scale: float, features: Features) -> Iterator[_Part]:
        """Yield what attention computes at once."""
        blocks = self.last_blocks if last else self.blocks
        if blocks is not None and features.plain_softmax and features.whole(self.longest):

            def compute(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
                return attend_blocks(query[0], key[0], value[0], blocks, scale)[None].transpose(1, 2)

            whole = slice(0, self.stop - self.start)
            yield _Part(whole, slice(0, self.stop), compute)
            return
        for segment in self.last_segments if last else self.segments:
            yield from _within(segment, num_heads, scale, features)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Queries and keys, by indices in the piece and in the micro-batch, and how they are computed."""

    queries: Tokens
    keys: Tokens
    compute: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    """Query, key, value and sinks to ``[1, head, token, dim]``."""


def _within(segment: Segment, num_heads: int, scale: float, features: Features) -> Iterator[_Part]:
    """Cut a segment so that few scores exist at once."""

    def computing(at: IntArray | None) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
        def compute(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            there = None if at is None else torch.from_numpy(at).to(query.device)
            return attend_row(query, key, value, there, scale, replace(features, sinks=sinks))

        return compute

    if segment.at is None:
        yield _Part(segment.queries, segment.keys, computing(None))
        return
    step = max(1, MAX_SCORES // (num_heads * int(segment.at[-1] + 1)))
    for start in range(0, len(segment.at), step):
        at = segment.at[start : start + step]
        # A window, unlike a chunk, does not depend on where positions begin.
        first = 0 if features.window is None or features.chunk else max(0, int(at[0]) - features.window + 1)
        keys = _span(segment.keys, first, int(at[-1]) + 1)
        yield _Part(_span(segment.queries, start, start + len(at)), keys, computing(at - first))


def _span(tokens: Tokens, start: int, stop: int) -> Tokens:
    """Return some of consecutive or listed tokens."""
    if isinstance(tokens, slice):
        return slice(tokens.start + start, tokens.start + stop)
    return tokens[start:stop]


class _PieceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        piece: Piece,
        layer: int,
        last: bool,
        scale: float,
        features: Features,
    ) -> Tensor:
        piece.cache.write(layer, piece.start, key, value)
        keys, values = piece.cache.read(layer, piece.stop)
        output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        given = replace(features, sinks=sinks)
        for part in piece.parts(query.shape[1], last, scale, given):
            own = (_take(query, part.queries), _take(keys, part.keys), _take(values, part.keys))
            output[:, part.queries] = part.compute(*own, sinks).transpose(1, 2).to(output.dtype)
        ctx.save_for_backward(query, sinks)
        ctx.given = (piece, layer, last, scale, given)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, sinks = ctx.saved_tensors
        piece, layer, last, scale, features = ctx.given
        keys, values = piece.cache.read(layer, piece.stop)
        query_grad = torch.zeros_like(query, dtype=torch.float32)
        key_grad, value_grad = piece.cache.grads(layer)
        sinks_grad = None if sinks is None else torch.zeros_like(sinks)
        for part in piece.parts(query.shape[1], last, scale, features):
            own = (_take(query, part.queries), _take(keys, part.keys), _take(values, part.keys))
            leaves = [one.detach().requires_grad_() for one in own]
            if sinks is not None:
                leaves.append(sinks.detach().requires_grad_())
            with torch.enable_grad():
                output = part.compute(*leaves, *([None] if sinks is None else []))
            above = grads[0][:, part.queries].transpose(1, 2).to(output.dtype)
            found = torch.autograd.grad(output, leaves, above)
            _add(query_grad, part.queries, found[0])
            _add(key_grad, part.keys, found[1])
            _add(value_grad, part.keys, found[2])
            if sinks_grad is not None:
                sinks_grad += found[3]
        # Later pieces have added theirs before: the gradients of these keys and values are complete.
        own_tokens = slice(piece.start, piece.stop)
        return (
            query_grad.to(query.dtype),
            key_grad[:, :, own_tokens].to(keys.dtype),
            value_grad[:, :, own_tokens].to(values.dtype),
            sinks_grad,
            *[None] * 5,
        )


def _take(states: Tensor, tokens: Tokens) -> Tensor:
    return states[:, :, tokens] if isinstance(tokens, slice) else states.index_select(2, tokens)


def _add(total: Tensor, tokens: Tokens, states: Tensor) -> None:
    if isinstance(tokens, slice):
        total[:, :, tokens] += states
    else:
        total.index_add_(2, tokens, states.to(total.dtype))


def plan_pieces(packing: Packing, spots: IntArray, max_tokens: int, device: torch.device) -> list[Piece]:
    """Cut a packing into pieces of similar size; ``spots``: the packed tokens that predict action tokens."""
    count = len(packing.ids)
    bounds = np.linspace(0, count, -(-count // max_tokens) + 1).round().astype(int).tolist()
    cache = KeyValues(count)
    return [
        _piece(packing, spots, start, stop, device, cache)
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def _piece(
    packing: Packing, spots: IntArray, start: int, stop: int, device: torch.device, cache: KeyValues
) -> Piece:
    def there(numbers: IntArray) -> Tensor:
        return torch.from_numpy(numbers).to(device)

    actions = np.flatnonzero((spots >= start) & (spots < stop))
    own_spots = spots[actions] - start
    wanted = np.unique(own_spots) if len(own_spots) else np.zeros(1, dtype=np.int64)
    everything = np.arange(start, stop)
    blocks = last_blocks = None
    if in_blocks(device):
        blocks = _shifted(plan_blocks(packing, device, everything), start)
        last_blocks = _shifted(plan_blocks(packing, device, wanted + start), start)
    return Piece(
        start=start,
        stop=stop,
        ids=there(packing.ids[start:stop])[None],
        positions=there(packing.positions[start:stop])[None],
        spots=there(own_spots),
        actions=there(actions),
        computed_wanted=there(wanted),
        segments=_segments(packing, everything, start, device),
        last_segments=_segments(packing, wanted + start, start, device),
        blocks=blocks,
        last_blocks=last_blocks,
        longest=max(packing.sizes),
        cache=cache,
    )


def _shifted(blocks: Sequence[Block], start: int) -> list[Block]:
    """Return blocks whose queries are indices in the piece that starts at a token."""
    return [replace(block, queries=cast(Tensor, block.queries) - start) for block in blocks]


def _segments(packing: Packing, queries: IntArray, start: int, device: torch.device) -> list[Segment]:
    """Return segments for some sorted tokens of the piece that starts at a token."""
    segments = []
    first = 0  # the rows' own tokens lie one after another
    for index, shared in zip(packing.order, packing.shared, strict=True):
        path = packing.paths[index]
        end = first + len(path) - shared
        own = queries[np.searchsorted(queries, first) : np.searchsorted(queries, end)]
        if len(own):
            at = own - first + shared
            keys = path[: at[-1] + 1]
            whole = len(own) == len(keys)
            segment = Segment(_tokens(own - start, device), _tokens(keys, device), None if whole else at)
            segments.append(segment)
        first = end
    return segments


def _tokens(numbers: IntArray, device: torch.device) -> Tokens:
    """Return indices as a slice, where they follow one another."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first + 1 == len(numbers):
        return slice(first, last + 1)
    return torch.from_numpy(numbers).to(device)


def states_in_pieces(body: Any, pieces: Sequence[Piece], num_actions: int) -> Tensor:
    """Return [num_actions, width]: the last states of a transformer that predict the action tokens."""
    if not torch.is_grad_enabled():
        return _all_states(body, pieces, num_actions)
    anchor = torch.zeros((), device=pieces[0].ids.device, requires_grad=True)
    apply: Any = _PieceStates.apply
    result: Tensor = apply(anchor, body, pieces, num_actions)
    return result


def _all_states(body: Any, pieces: Sequence[Piece], num_actions: int) -> Tensor:
    result: Tensor | None = None
    for piece in pieces:
        states = _states(body, piece)
        if result is None:
            result = states.new_empty(num_actions, states.shape[1])
        result[piece.actions] = states
    assert result is not None
    return result


def _states(body: Any, piece: Piece) -> Tensor:
    output = body(input_ids=piece.ids, position_ids=piece.positions, cu_seq_lens_q=piece, use_cache=False)
    states: Tensor = output.last_hidden_state[0].index_select(0, piece.spots)
    return states


class _PieceStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, body: Any, pieces: Sequence[Piece], num_actions: int) -> Tensor:
        ctx.body, ctx.pieces, ctx.precision = body, pieces, _precision(anchor.device.type)
        return _all_states(body, pieces, num_actions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for piece in reversed(ctx.pieces):
            with torch.enable_grad(), ctx.precision():
                states = _states(ctx.body, piece)
            torch.autograd.backward(states, grads[0].index_select(0, piece.actions))
        return None, None, None, None


def _precision(kind: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes the present context of mixed precision again."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
