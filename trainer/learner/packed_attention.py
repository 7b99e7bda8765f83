"""Packed rows in transformers models: attention within each row, and a last layer without unused work.

Sliding windows, chunks, capped scores and sinks are supported; any other feature of a model's attention is
`Unsupported`, and its rows are padded. The last layer's states are read only where an action token is
predicted: its queries and MLP are computed there only, its keys and values for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rollgym.engines.embedded.features import Features, attention_features, eager_attention
from rollgym.engines.embedded.precision import is_fast_at_bfloat16
from rollgym.trainer.data.packing import LONG_PREFIX, Packing
from rollgym.trainer.data.sequences import IntArray
from rollgym.trainer.learner.block_attention import Block, attend_blocks, plan_blocks
from rollgym.trainer.learner.context_parallel import ContextSlice

PACKED = "rollgym_packed"
"""The name under which transformers knows the attention of packed rows."""
FEW = 0.5
"""Above this fraction of wanted tokens, attention is computed for all of them."""
MUCH_SHARED = 16
"""Ratio of the rows' tokens to the computed ones from which the backward pass gathers the keys and values of
shared prefixes again: kept for each row, they would outweigh all other activations."""

MAX_SCORES = 2**26
"""Scores of heads, queries and keys that masked attention holds at once: 128 MB in bfloat16."""


@dataclass(frozen=True, slots=True, eq=False)
class Paths:
    """A packing for a model; passed in place of transformers' cumulative lengths of packed rows."""

    sizes: list[int]
    """Lengths of the rows."""
    shared: Sequence[int]
    """Length of each row's prefix that is shared with an earlier row."""
    route: Tensor | None = None
    """Token indices of the rows end to end; None if they are in that order already."""
    wanted: Tensor | None = None
    """Indices of the tokens whose last states are read; None for all."""
    asking: Sequence[Tensor] | None = None
    """Positions of these in the row that holds them, if there are few."""
    blocks: Sequence[Block] | None = None
    """Blocks of queries, where attention by plain matrix products is faster."""
    last_blocks: Sequence[Block] | None = None
    """The same for the wanted tokens alone, if there are few."""
    context: ContextSlice | None = None
    """This rank's slice, where several ranks share the tokens."""
    context_wanted: Tensor | None = None
    """Indices in the slice of its wanted tokens, or of any one."""

    @property
    def computed_wanted(self) -> Tensor | None:
        """Indices of the wanted tokens among those that this rank computes; None for all."""
        return self.wanted if self.context is None else self.context_wanted

    @property
    def own(self) -> list[int]:
        """Number of tokens that each row does not share with an earlier one."""
        return [size - shared for size, shared in zip(self.sizes, self.shared, strict=True)]


def paths_of(packing: Packing, spots: IntArray, device: torch.device) -> Paths:
    """Make paths on a device, of which the states at ``spots`` will be read."""
    paths = _row_paths(packing, spots, device)
    if not in_blocks(device):
        return paths
    last_blocks = None if paths.asking is None else plan_blocks(packing, device, np.unique(spots))
    return replace(paths, blocks=plan_blocks(packing, device), last_blocks=last_blocks)


def in_slice(paths: Paths, context: ContextSlice, own_spots: IntArray, device: torch.device) -> Paths:
    """Return paths of which this rank computes a slice; the states at ``own_spots`` of it will be read."""
    wanted = np.unique(own_spots) if len(own_spots) else np.zeros(1, dtype=np.int64)
    return replace(paths, context=context, context_wanted=torch.from_numpy(wanted).to(device))


def in_blocks(device: torch.device) -> bool:
    """Return whether blocks of plain products are faster: in bfloat16 on a CPU that is fast at it."""
    if device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return False
    return torch.get_autocast_dtype("cpu") == torch.bfloat16 and is_fast_at_bfloat16()


def _row_paths(packing: Packing, spots: IntArray, device: torch.device) -> Paths:
    def there(numbers: IntArray) -> Tensor:
        return torch.from_numpy(numbers).to(device)

    route = None if packing.route is None else there(packing.route)
    wanted = np.unique(spots)
    if len(wanted) > FEW * len(packing.ids):
        # The MLP still skips the others: ranks that share parameters must do the same with every module.
        return Paths(packing.sizes, packing.shared, route, there(wanted))
    paths = Paths(packing.sizes, packing.shared, route, there(wanted))
    cuts = np.searchsorted(wanted, np.cumsum(paths.own))
    asking = [there(positions) for positions in np.split(packing.positions[wanted], cuts[:-1])]
    return replace(paths, asking=asking)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention within each row, with transformers' signature: ``[batch, head, token, dim]``."""
    features = attention_features(module, attention_mask, kwargs)
    paths: Any = kwargs.get("cu_seq_lens_q") or Paths([query.shape[2]], [0])
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    last = getattr(module, "layer_idx", None) == _last(module)
    if not isinstance(paths, Paths):
        return paths.attend(module.layer_idx, query, key, value, last, scale, features), None
    if paths.context is None:
        return _attend_whole(query, key, value, paths, last, scale, features), None
    if features.sinks is not None:
        features = replace(features, sinks=paths.context.own_heads(features.sinks))
    dtype = compute_dtype(query)
    query, key, value = paths.context.to_heads(query.to(dtype), key.to(dtype), value.to(dtype))
    return paths.context.to_tokens(_attend_whole(query, key, value, paths, last, scale, features)), None


def compute_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype that attention computes in."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _attend_whole(
    query: Tensor, key: Tensor, value: Tensor, paths: Paths, last: bool, scale: float, features: Features
) -> Tensor:
    """Compute attention within each row, whose tokens are all here: ``[batch, token, head, dim]``."""
    if paths.blocks is not None and features.plain_softmax and features.whole(max(paths.sizes)):
        dtype = torch.get_autocast_dtype("cpu")
        blocks = paths.last_blocks if last and paths.last_blocks is not None else paths.blocks
        query, key, value = (states[0].to(dtype) for states in (query, key, value))
        return attend_blocks(query, key, value, blocks, scale)[None]
    if sum(paths.sizes) < MUCH_SHARED * sum(paths.own) or not torch.is_grad_enabled():
        return _attend(query, key, value, paths, last, scale, features)
    attended: Tensor = checkpoint(
        _attend,
        query,
        key,
        value,
        paths,
        last,
        scale,
        features,
        use_reentrant=False,
        preserve_rng_state=False,
    )
    return attended


def _attend(
    query: Tensor, key: Tensor, value: Tensor, paths: Paths, last: bool, scale: float, features: Features
) -> Tensor:
    """Compute attention within each row: ``[batch, token, head, dim]``."""

    def along_paths(states: Tensor) -> tuple[Tensor, ...]:
        if paths.route is not None:
            states = states.transpose(1, 2).index_select(1, paths.route).transpose(1, 2)
        return torch.split(states, paths.sizes, 2)

    rows = list(zip(along_paths(key), along_paths(value), strict=True))
    if last and paths.wanted is not None and paths.asking is not None:
        queries = torch.split(query.index_select(2, paths.wanted), list(map(len, paths.asking)), 2)
        outputs = [
            attend_row(q, k, v, at, scale, features)
            for q, (k, v), at in zip(queries, rows, paths.asking, strict=True)
            if len(at)
        ]
        return _spread(torch.cat(outputs, 2).transpose(1, 2), paths.wanted, query.shape[2])
    if max(paths.shared) < LONG_PREFIX:
        outputs = [
            attend_row(q, k, v, None, scale, features)[:, :, shared:]
            for q, (k, v), shared in zip(along_paths(query), rows, paths.shared, strict=True)
        ]
    else:
        outputs = [
            attend_row(q, k, v, _after(shared, k), scale, features)
            for q, (k, v), shared in zip(torch.split(query, paths.own, 2), rows, paths.shared, strict=True)
            if q.shape[2]
        ]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


def _after(shared: int, key: Tensor) -> Tensor | None:
    """Return the positions of a row's own queries; None if all of them are."""
    return torch.arange(shared, key.shape[2], device=key.device) if shared else None


def attend_row(
    query: Tensor, key: Tensor, value: Tensor, at: Tensor | None, scale: float, features: Features
) -> Tensor:
    """Compute attention within one row; ``at``: positions of the queries, if they are not all of it."""
    size = key.shape[2]
    how: Any = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if features.plain_softmax and features.whole(size):
        if at is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, **how)
        if len(at) == 1 and bool(at[0] == size - 1):
            return F.scaled_dot_product_attention(query, key, value, **how)
    at = torch.arange(size, device=query.device) if at is None else at
    step = few_queries(query.shape[0] * query.shape[1], size)
    if len(at) <= step:
        return _masked(query, key, value, at, scale, features)
    # With a mask, kernels may hold the scores of all heads, queries and keys: so few queries at a time.
    parts = zip(torch.split(query, step, 2), torch.split(at, step), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([_masked(q, key, value, part, scale, features) for q, part in parts], 2)
    again: Any = {"use_reentrant": False, "preserve_rng_state": False}
    outputs = [checkpoint(_masked, q, key, value, part, scale, features, **again) for q, part in parts]
    return torch.cat(outputs, 2)


def few_queries(num_heads: int, num_keys: int) -> int:
    """Return the number of queries whose scores are held at once."""
    return max(1, MAX_SCORES // (num_heads * num_keys))


def _masked(
    query: Tensor, key: Tensor, value: Tensor, at: Tensor, scale: float, features: Features
) -> Tensor:
    """Compute attention of queries at some positions of a row, with a mask."""
    seen = features.sees(at, torch.arange(key.shape[2], device=query.device))
    if features.plain_softmax:
        how: Any = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, **how)
    return eager_attention(query, key, value, seen, scale, features)


def _last(module: Any) -> int:
    return int(module.config.num_hidden_layers) - 1


def _spread(states: Tensor, wanted: Tensor, size: int) -> Tensor:
    """Return ``[batch, tokens, ...]`` with values at the wanted tokens, and 0 elsewhere."""
    whole = states.new_zeros(states.shape[0], size, *states.shape[2:])
    return whole.index_copy(1, wanted, states)


def spare_last_layer(body: Any) -> None:
    """Make the last layer's MLP compute only the tokens whose states will be read, if it has one.

    Rows that are not packed are not affected.
    """
    layers = getattr(body, "layers", None) or getattr(body, "h", None)
    if layers is not None and isinstance(getattr(layers[-1], "mlp", None), nn.Module):
        layers[-1].register_forward_pre_hook(_note_wanted, with_kwargs=True)
        layers[-1].mlp.register_forward_pre_hook(_choose_wanted)
        layers[-1].mlp.register_forward_hook(_spread_wanted)


def _note_wanted(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    paths = kwargs.get("cu_seq_lens_q")
    wanted = None if paths is None else paths.computed_wanted
    layer.mlp.rollgym_wanted = None if wanted is None else (wanted, args[0].shape[1])


def _choose_wanted(mlp: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    if mlp.rollgym_wanted is None:
        return None
    return (args[0].index_select(1, mlp.rollgym_wanted[0]), *args[1:])


def _spread_wanted(mlp: Any, args: Any, output: Any) -> Any:
    if mlp.rollgym_wanted is None:
        return None
    if isinstance(output, tuple):  # some experts return what their router said besides
        return (_spread(output[0], *mlp.rollgym_wanted), *output[1:])
    return _spread(output, *mlp.rollgym_wanted)
