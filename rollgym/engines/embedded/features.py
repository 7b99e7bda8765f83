"""Attention features of transformers models beyond plain causal attention.

The engine and the learner replace a model's attention function. A window or chunk arrives with the mask or
as an argument, soft-capping and sinks as arguments: `attention_features` reads all of them. Custom masks
cannot be read and are rejected.

Some models behave differently only beyond a length that a short check does not reach: `position_limit` and
`length_dependent_settings` find that in their configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "PLAIN",
    "Features",
    "Local",
    "Unsupported",
    "attention_features",
    "local_mask",
    "local_sizes",
    "position_limit",
    "length_dependent_settings",
    "unknown_layers",
    "eager_attention",
]

KNOWN_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"}
)
"""Layer types, as in configurations, whose only state is keys and values."""
_UNSUPPORTED = ("head_mask", "position_bias", "indices", "block_mask")
"""Arguments of attention functions that are not implemented here."""
_LENGTH_DEPENDENT = (
    "floor_scale",
    "log_scaling_n_floor",
    "index_topk",
    "index_topk_blocks",
    "keep_window_size",
)
"""Settings that change what a layer computes beyond some length."""


class Unsupported(Exception):
    """An unsupported attention feature; the message completes "it has ..."."""


@dataclass(frozen=True, slots=True)
class Local:
    """Placeholder of a mask: how far back a layer attends."""

    size: int | None
    chunked: bool
    custom: bool = False
    """Whether the mask is unknown."""

    def __getitem__(self, _: object) -> Local:
        """Models slice masks to the available keys; there is nothing to slice here."""
        return self


@dataclass(frozen=True, slots=True)
class Features:
    """Attention features of one layer beyond plain causal attention."""

    window: int | None = None
    """Number of keys that a query attends to, its own included."""
    chunk: int | None = None
    """Chunk size in tokens: queries attend to keys of the same chunk only."""
    softcap: float | None = None
    """Soft cap of the scores."""
    sinks: Tensor | None = None
    """[head] score of the attention sink."""

    @property
    def plain_softmax(self) -> bool:
        """Whether the weights are a softmax of the scores, as in `scaled_dot_product_attention`."""
        return self.softcap is None and self.sinks is None

    def whole(self, length: int) -> bool:
        """Whether tokens of a sequence of this length attend to all previous tokens."""
        return length <= min(self.window or length, self.chunk or length)

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return ``[query, key]``: whether the query at a position attends to the key at another."""
        at, to = queries[:, None], keys[None]
        seen = to <= at
        if self.window is not None:
            seen &= to > at - self.window
        if self.chunk is not None:
            seen &= to // self.chunk == at // self.chunk
        return seen


PLAIN = Features()


def local_mask(*_: object, config: Any = None, local_size: int | None = None, **kwargs: Any) -> Local | None:
    """Mask function for transformers that keeps what `attention_features` needs; None: plain causal."""
    if kwargs.get("use_vmap"):  # the model adds its own mask function
        return Local(None, False, custom=True)
    if local_size is None:
        return None
    return Local(local_size, local_size != getattr(config, "sliding_window", None))


def attention_features(module: nn.Module, mask: object, kwargs: Mapping[str, Any]) -> Features:
    """Read the features from the arguments of an attention function, or raise `Unsupported`."""
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise Unsupported(f"attention with {name}")
    if isinstance(mask, Tensor) or (isinstance(mask, Local) and mask.custom):
        raise Unsupported("a custom attention mask")
    window, chunk = kwargs.get("sliding_window") or None, None
    if isinstance(mask, Local):
        window, chunk = (window, mask.size) if mask.chunked else (mask.size, None)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if window is None and chunk is None and softcap is None and sinks is None:
        return PLAIN
    return Features(window, chunk, softcap, sinks)


def eager_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, features: Features
) -> Tensor:
    """Attention with soft-capped scores or sinks: ``[batch, head, token]`` in and out."""
    heads = query.shape[1] // key.shape[1]
    if heads > 1:
        key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    scores = query @ key.transpose(2, 3) * scale
    if features.softcap is not None:
        scores = torch.tanh(scores / features.softcap) * features.softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    if features.sinks is not None:
        sinks = features.sinks.to(scores.dtype).view(1, -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[2]] @ value


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def position_limit(config: Any) -> int | None:
    """Return the longest sequence whose position embeddings do not depend on the batch; None: no limit.

    Embeddings of ``longrope`` and ``dynamic`` depend on the longest sequence of a pass: beyond their original
    length, a token's log-prob would depend on the rest of its batch and on later tokens.
    """
    config = _text(config)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [one for one in rope.values() if isinstance(one, Mapping)]
    whole = getattr(config, "max_position_embeddings", None)
    found = [
        one.get("original_max_position_embeddings") or whole
        for one in kinds
        if one.get("rope_type") == "longrope" or "dynamic" in str(one.get("rope_type"))
    ]
    return min((int(length) for length in found if length is not None), default=None)


def local_sizes(config: Any) -> list[int]:
    """Return the window and chunk sizes of a configuration."""
    found = [getattr(_text(config), name, None) for name in ("sliding_window", "attention_chunk_size")]
    return [size for size in found if isinstance(size, int)]


def unknown_layers(config: Any) -> list[str]:
    """Return the layer types with state beyond keys and values, or with unknown attention."""
    config = _text(config)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    return sorted({str(kind) for kind in kinds} - KNOWN_LAYERS)


def length_dependent_settings(config: Any) -> dict[str, int]:
    """Return settings that change the model beyond some length, with that length."""
    config = _text(config)
    found = {name: getattr(config, name, None) for name in _LENGTH_DEPENDENT}
    if not getattr(config, "attn_temperature_tuning", True):
        found.pop("floor_scale")
    return {name: value for name, value in found.items() if isinstance(value, int) and value > 0}
