"""Any other attention decoder: the transformers module's own forward, with attention over our arena.

Every row goes in as a sequence of one token with its position; the attention function, which transformers
lets us register, keeps keys and values in the arena and looks at what came before: all of it, a window or a
chunk, with capped scores or sinks, as the layer asks. Whatever else mixes tokens (convolutions, state-space
layers) would go unseen: `Model` refuses layers that it does not know by name, compares the result with the
plain forward, and refuses a model for which they differ.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from rollgym.engines.embedded.attention import Rows, attend, store
from rollgym.engines.embedded.features import Unsupported, asked_for, local_mask

__all__ = ["Heads", "ModuleDecoder"]

_NAME = "rollgym_rows"


_current = threading.local()


@dataclass(frozen=True, slots=True)
class Heads:
    """What the attention layers of a module keep."""

    layers: int
    heads: int
    """Of keys, in the layer that has most."""
    dim: int
    """Of a key or value, whichever is larger."""
    queries: int
    """How many query heads share a head of keys, at most."""


class ModuleDecoder:
    """Rows in, logits out."""

    def __init__(self, module: Any) -> None:
        self.module = module
        module.set_attn_implementation(_NAME)
        self.heads = self._look()

    @torch.inference_mode()
    def _look(self) -> Heads:
        """Read one token, to see what attention is asked for."""
        seen: dict[int, tuple[int, int, int]] = {}
        _current.seen = seen
        try:
            ids = torch.zeros(1, 1, dtype=torch.long, device=self.module.device)
            self.module(input_ids=ids, position_ids=ids, use_cache=False)
        finally:
            del _current.seen
        if not seen:
            raise Unsupported("no attention that can be replaced")
        heads, dims, queries = (max(column) for column in zip(*seen.values(), strict=True))
        return Heads(max(seen) + 1, heads, dims, queries)

    def __call__(self, rows: Rows, wanted: Tensor | None) -> Tensor:
        """Logits of the wanted rows (all where ``None``); the arena gets the rows' keys and values."""
        _current.rows = rows
        try:
            out = self.module(
                input_ids=rows.ids[:, None], position_ids=rows.positions[:, None], use_cache=False
            )
        finally:
            del _current.rows
        logits = cast(Tensor, out.logits)[:, 0]
        return logits if wanted is None else logits[wanted]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: ``[row, head, 1, dim]`` in, ``[row, 1, head, dim]`` out."""
    features = asked_for(module, attention_mask, kwargs)
    layer = cast(int, module.layer_idx)
    count, heads, tokens, dim = query.shape
    kv_heads, wide = key.shape[1], value.shape[-1]
    if tokens != 1:
        raise Unsupported("attention over more than its tokens")
    if (seen := getattr(_current, "seen", None)) is not None:
        if layer in seen:
            raise Unsupported("layers that attend more than once")
        seen[layer] = kv_heads, max(dim, wide), heads // kv_heads
        return value.repeat_interleave(heads // kv_heads, 1).transpose(1, 2), None
    rows = cast(Rows, _current.rows)
    scale = dim**-0.5 if scaling is None else scaling
    if dim != wide:  # zeros add nothing to a score, and what they add to a result is cut off
        size = max(dim, wide)
        query, key = F.pad(query, (0, size - dim)), F.pad(key, (0, size - dim))
        value = F.pad(value, (0, size - wide))
    store(rows, layer, torch.cat([key, value], 2).transpose(1, 2))
    queries = query.reshape(count, kv_heads, heads // kv_heads, query.shape[-1])
    found = attend(rows, layer, queries, scale, features)[..., :wide]
    return found.reshape(count, 1, heads, wide).contiguous(), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, local_mask)
