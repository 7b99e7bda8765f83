"""Packed rows in transformers models: attention within each row, and a last layer without unused work.

Sliding windows, chunks, capped scores and sinks are supported; any other feature of a model's attention is
`Unsupported`, and its rows are padded. The last layer's states are read only where an action token is
predicted: its queries and MLP are computed there only, its keys and values for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollgym.engines.embedded.features import Features, attention_features, eager_attention
from rollgym.trainer.data.packing import Packing
from rollgym.trainer.data.sequences import IntArray

PACKED = "rollgym_packed"
"""The name under which transformers knows the attention of packed rows."""
FEW = 0.5
"""Above this fraction of wanted tokens, attention is computed for all of them."""


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


def paths_of(packing: Packing, spots: IntArray, device: torch.device) -> Paths:
    """Make paths on a device, of which the states at ``spots`` will be read."""

    def there(numbers: IntArray) -> Tensor:
        return torch.from_numpy(numbers).to(device)

    route = None if packing.route is None else there(packing.route)
    wanted = np.unique(spots)
    if len(wanted) > FEW * len(packing.ids):
        # The MLP still skips the others: ranks that share parameters must do the same with every module.
        return Paths(packing.sizes, packing.shared, route, there(wanted))
    brought = [size - shared for size, shared in zip(packing.sizes, packing.shared, strict=True)]
    cuts = np.searchsorted(wanted, np.cumsum(brought))
    asking = [there(positions) for positions in np.split(packing.positions[wanted], cuts[:-1])]
    return Paths(packing.sizes, packing.shared, route, there(wanted), asking)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention within each row, with transformers' signature: ``[batch, head, token, dim]``."""
    features = attention_features(module, attention_mask, kwargs)
    paths: Paths = kwargs.get("cu_seq_lens_q") or Paths([query.shape[2]], [0])
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    along: tuple[Tensor, ...] = (query, key, value)
    if paths.route is not None:
        along = tuple(x.transpose(1, 2).index_select(1, paths.route).transpose(1, 2) for x in along)
    rows = list(zip(*(torch.split(x, paths.sizes, 2) for x in along), strict=True))
    if paths.wanted is None or paths.asking is None or getattr(module, "layer_idx", None) != _last(module):
        outputs = [
            _row(q, k, v, None, scale, features)[:, :, shared:]
            for (q, k, v), shared in zip(rows, paths.shared, strict=True)
        ]
        return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None
    outputs = [
        _row(q.index_select(2, at), k, v, at, scale, features)
        for (q, k, v), at in zip(rows, paths.asking, strict=True)
        if len(at)
    ]
    return _spread(torch.cat(outputs, 2).transpose(1, 2), paths.wanted, query.shape[2]), None


def _row(
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
    every = torch.arange(size, device=query.device)
    seen = features.sees(every if at is None else at, every)
    if features.plain_softmax:
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
    layer.mlp.rollgym_wanted = (
        None if paths is None or paths.wanted is None else (paths.wanted, args[0].shape[1])
    )


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
