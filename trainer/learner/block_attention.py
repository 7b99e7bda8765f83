"""Attention of packed rows by plain matrix products over blocks of queries.

On CPUs that are fast at bfloat16, matrix products run at several times the speed of torch's fused attention,
whose kernel for CPUs is made for float32. Here scores exist for one block of queries at a time, and the
backward pass computes them again. Rows that share a prefix attend to it together: a block may hold the
queries of several rows, with a mask where they differ. Neither keys nor values are repeated, for heads that
share them or for rows that share a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollgym.trainer.data.packing import Packing
from rollgym.trainer.data.sequences import IntArray

BLOCK = 128
"""Queries of a block at most: a causal row skips most of the keys after its queries."""
MAX_PAIRS = 2**18
"""Pairs of a query and a key of a block at most, for each head."""
BLOCK_COST = 4096
"""Cost of another block, in pairs of a query and a key: rows share a block unless that adds more pairs."""
MAX_HULL = 1.25
"""Up to this multiple of the keys that are needed, a contiguous range is read rather than gathered."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Some queries of a packing and the keys that they attend to, as token indices."""

    queries: slice | Tensor
    num_queries: int
    keys: slice | Tensor
    bias: Tensor | None
    """[queries, last keys] 0 or -inf; keys before these are seen by all queries of the block."""


def plan_blocks(packing: Packing, device: torch.device, wanted: IntArray | None = None) -> list[Block]:
    """Cut the queries of a packing into blocks; with ``wanted``, only these sorted tokens are queries."""
    blocks: list[Block] = []
    pieces: list[_Piece] = []
    keys = _NONE
    for piece in _pieces(packing, wanted):
        own = np.sort(piece.path)
        union = np.union1d(keys, own)
        queries = sum(len(one.queries) for one in pieces)
        apart = queries * len(keys) + len(piece.queries) * len(own) + BLOCK_COST
        together = (queries + len(piece.queries)) * len(union)
        full = queries + len(piece.queries) > BLOCK or together > MAX_PAIRS
        if pieces and (full or together > apart):
            blocks.append(_block(pieces, keys, device, gathered=wanted is not None))
            pieces, union = [], own
        pieces.append(piece)
        keys = union
    if pieces:
        blocks.append(_block(pieces, keys, device, gathered=wanted is not None))
    return blocks


_NONE: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Queries of one row: token indices, and the path from the row's first token to the last query."""

    queries: IntArray
    path: IntArray


def _pieces(packing: Packing, wanted: IntArray | None) -> list[_Piece]:
    pieces = []
    for index, shared in zip(packing.order, packing.shared, strict=True):
        path = packing.paths[index]
        at = np.arange(shared, len(path))
        if wanted is not None:
            at = at[np.isin(path[shared:], wanted, assume_unique=True)]
        step = max(1, min(BLOCK, MAX_PAIRS // max(len(path), 1)))
        for start in range(0, len(at), step):
            part = at[start : start + step]
            pieces.append(_Piece(path[part], path[: part[-1] + 1]))
    return pieces


def _block(pieces: Sequence[_Piece], keys: IntArray, device: torch.device, *, gathered: bool) -> Block:
    queries = np.concatenate([piece.queries for piece in pieces])
    first, last = int(keys[0]), int(keys[-1])
    chosen: slice | Tensor
    if last - first + 1 <= MAX_HULL * len(keys):
        chosen, columns = slice(first, last + 1), np.arange(first, last + 1)
    else:
        chosen, columns = torch.from_numpy(keys).to(device), keys
    seen = np.zeros((len(queries), len(columns)), dtype=bool)
    row = 0
    for piece in pieces:
        place = np.searchsorted(columns, piece.path)
        # A path ascends: a query sees the tokens of its path up to itself.
        seen[row : row + len(piece.queries), place] = piece.path <= piece.queries[:, None]
        row += len(piece.queries)
    everyone = seen.all(0)
    start = len(columns) if everyone.all() else int(everyone.argmin())
    bias = None
    if start < len(columns):
        bias = torch.zeros(len(queries), len(columns) - start, device=device)
        bias.masked_fill_(~torch.from_numpy(seen[:, start:]).to(device), -torch.inf)
    where = torch.from_numpy(queries).to(device) if gathered else slice(int(queries[0]), int(queries[-1]) + 1)
    return Block(where, len(queries), chosen, bias)


def attend_blocks(query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float) -> Tensor:
    """Compute attention: ``[head, token, dim]`` to ``[token, head, dim]``, 0 at tokens of no block."""
    attend: Any = _BlockAttention.apply
    result: Tensor = attend(query, key, value, blocks, scale)
    return result


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scale: float
    ) -> Tensor:
        heads, tokens, width = query.shape
        shape = (tokens, heads, value.shape[2])
        whole = sum(block.num_queries for block in blocks) == tokens
        output = query.new_empty(shape) if whole else query.new_zeros(shape)
        for block in blocks:
            states = _grouped(_take(query, block.queries), len(key))
            weights = _weights(states, _take(key, block.keys), block, scale).to(query.dtype)
            attended = torch.bmm(weights, _take(value, block.keys))
            output[block.queries] = attended.view(heads, block.num_queries, -1).transpose(0, 1)
        ctx.save_for_backward(query, key, value, output)
        ctx.blocks, ctx.scale = blocks, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output = ctx.saved_tensors
        grad = grads[0]
        shared = len(key)
        heads = len(query)
        query_grad = torch.zeros_like(query)
        # Sums over blocks are kept in float32, whatever the compute dtype.
        key_grad = torch.zeros_like(key, dtype=torch.float32)
        value_grad = torch.zeros_like(value, dtype=torch.float32)
        for block in ctx.blocks:
            states = _grouped(_take(query, block.queries), shared)
            keys, values = _take(key, block.keys), _take(value, block.keys)
            weights = _weights(states, keys, block, ctx.scale)
            above = _grouped(grad[block.queries].transpose(0, 1), shared)
            below = _grouped(output[block.queries].transpose(0, 1), shared)
            _add(value_grad, block.keys, torch.bmm(weights.to(query.dtype).mT, above))
            mean = (above.float() * below.float()).sum(-1, keepdim=True)
            slope = torch.bmm(above, values.mT).float().sub_(mean).mul_(weights)
            slope = slope.mul_(ctx.scale).to(query.dtype)
            query_grad[:, block.queries] = torch.bmm(slope, keys).view(heads, block.num_queries, -1)
            _add(key_grad, block.keys, torch.bmm(slope.mT, states))
        return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), None, None


def _take(states: Tensor, tokens: slice | Tensor) -> Tensor:
    return states[:, tokens] if isinstance(tokens, slice) else states.index_select(1, tokens)


def _add(total: Tensor, tokens: slice | Tensor, states: Tensor) -> None:
    if isinstance(tokens, slice):
        total[:, tokens] += states
    else:
        total.index_add_(1, tokens, states.to(total.dtype))


def _grouped(states: Tensor, shared: int) -> Tensor:
    """Return ``[shared head, heads that share it x queries, dim]``."""
    return states.reshape(shared, -1, states.shape[-1])


def _weights(query: Tensor, key: Tensor, block: Block, scale: float) -> Tensor:
    """Return the attention weights in float32: ``[shared head, heads that share it x queries, key]``."""
    scores = torch.bmm(query, key.mT).float().mul_(scale)
    if block.bias is not None:
        by_head = scores.view(-1, block.num_queries, scores.shape[2])
        by_head[..., scores.shape[2] - block.bias.shape[1] :] += block.bias
    return torch.softmax(scores, -1)
