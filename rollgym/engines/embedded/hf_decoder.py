"""Decoder for other models: the forward of the transformers module, with attention over our KV cache.

Every token is passed as a sequence of length one with its position. A registered attention function writes
keys and values to the KV cache and attends to the past: all of it, a window or a chunk, with soft-capped
scores or sinks, as the layer requires. Other layers that mix tokens (convolutions, state-space layers) are
not supported: `Model` rejects unknown layer types and models whose logits differ from a plain forward.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from rollgym.engines.embedded.attention import ForwardBatch, attend, write_kv
from rollgym.engines.embedded.features import Unsupported, attention_features, local_mask
from rollgym.engines.embedded.routing import ExpertRecorder

__all__ = ["Heads", "HFDecoder"]

_NAME = "rollgym_kv_cache"


_current = threading.local()


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of the KV cache that a module needs."""

    layers: int
    heads: int
    """Key heads, maximum over the layers."""
    dim: int
    """Size of a key or value, whichever is larger."""
    queries: int
    """Query heads per key head, maximum over the layers."""


class HFDecoder:
    """Computes the logits of a `ForwardBatch`."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.recorder: ExpertRecorder | None = None
        """Set if the experts of every token are recorded in the KV cache."""
        module.set_attn_implementation(_NAME)
        self.heads = self._find_heads()

    @torch.inference_mode()
    def _find_heads(self) -> Heads:
        """Run one token and record the arguments of the attention calls."""
        seen: dict[int, tuple[int, int, int]] = {}
        _current.seen = seen
        try:
            ids = torch.zeros(1, 1, dtype=torch.long, device=self.module.device)
            self.module(input_ids=ids, position_ids=ids, use_cache=False)
        finally:
            del _current.seen
        if not seen:
            raise Unsupported("no replaceable attention")
        heads, dims, queries = (max(column) for column in zip(*seen.values(), strict=True))
        return Heads(max(seen) + 1, heads, dims, queries)

    def __call__(self, batch: ForwardBatch, wanted: Tensor | None) -> Tensor:
        """Return the logits of the wanted rows (None: all); writes the rows' keys and values to the cache."""
        _current.batch = batch
        try:
            out = self.module(
                input_ids=batch.ids[:, None], position_ids=batch.positions[:, None], use_cache=False
            )
        finally:
            del _current.batch
        if self.recorder is not None and batch.experts is not None:
            batch.experts[batch.cache_index] = self.recorder.take()[: batch.count]
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
    """Attention function for transformers: ``[row, head, 1, dim]`` in, ``[row, 1, head, dim]`` out."""
    features = attention_features(module, attention_mask, kwargs)
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
    batch = cast(ForwardBatch, _current.batch)
    scale = dim**-0.5 if scaling is None else scaling
    if dim != wide:  # zeros do not change a score, and padded results are cut off
        size = max(dim, wide)
        query, key = F.pad(query, (0, size - dim)), F.pad(key, (0, size - dim))
        value = F.pad(value, (0, size - wide))
    write_kv(batch, layer, torch.cat([key, value], 2).transpose(1, 2))
    queries = query.reshape(count, kv_heads, heads // kv_heads, query.shape[-1])
    out = attend(batch, layer, queries, scale, features)[..., :wide]
    return out.reshape(count, 1, heads, wide).contiguous(), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, local_mask)
