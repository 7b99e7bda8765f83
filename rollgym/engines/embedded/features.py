"""What a transformers model asks for beyond plain causal attention, and what its configuration hides.

The engine and the learner replace a model's attention function by their own. A window or a chunk arrives with
the mask or as an argument, a cap on the logits and sinks as arguments: `asked_for` reads all of them. A mask
that a model makes by itself cannot be read, and is refused.

Some models change only beyond a length that no short check reaches. Their configurations say so:
`position_limit` and `unknown_beyond` read them.
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
    "asked_for",
    "local_mask",
    "local_sizes",
    "position_limit",
    "unknown_beyond",
    "unknown_layers",
    "weigh",
]

KNOWN_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe"}
)
"""Kinds of layers, as configurations name them, that keep keys and values or nothing."""
_REFUSED = ("head_mask", "position_bias", "indices", "block_mask")
"""Arguments of attention functions that nothing here computes."""
_BEYOND = ("floor_scale", "log_scaling_n_floor", "index_topk", "index_topk_blocks", "keep_window_size")
"""Settings that change what a layer computes from some length on, in ways that only the model knows."""


class Unsupported(Exception):
    """Attention of a kind that is not computed here; the message completes "it has ..."."""


@dataclass(frozen=True, slots=True)
class Local:
    """Stands for a mask: how far back a layer looks."""

    size: int | None
    chunked: bool
    strange: bool = False
    """The mask is none of those known here."""

    def __getitem__(self, _: object) -> Local:
        """Models cut masks to the keys at hand; there is nothing to cut here."""
        return self


@dataclass(frozen=True, slots=True)
class Features:
    """Attention as one layer wants it, beyond plain causal attention."""

    window: int | None = None
    """Keys that a query sees, itself included."""
    chunk: int | None = None
    """Queries see keys of their own chunk of so many tokens."""
    softcap: float | None = None
    """Scores are bent to stay below this."""
    sinks: Tensor | None = None
    """[head] a score that takes a share of the weight and gives nothing."""

    @property
    def plain_softmax(self) -> bool:
        """Whether the weights are a softmax of the scores, as in `scaled_dot_product_attention`."""
        return self.softcap is None and self.sinks is None

    def whole(self, length: int) -> bool:
        """Whether rows of this length see all that came before."""
        return length <= min(self.window or length, self.chunk or length)

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """``[query, key]``: whether a query at a position sees the key at another."""
        at, to = queries[:, None], keys[None]
        seen = to <= at
        if self.window is not None:
            seen &= to > at - self.window
        if self.chunk is not None:
            seen &= to // self.chunk == at // self.chunk
        return seen


PLAIN = Features()


def local_mask(*_: object, config: Any = None, local_size: int | None = None, **kwargs: Any) -> Local | None:
    """A mask function for transformers that keeps what `asked_for` needs; None for plain causal attention."""
    if kwargs.get("use_vmap"):  # a function of the model's own was mixed in
        return Local(None, False, strange=True)
    if local_size is None:
        return None
    return Local(local_size, local_size != getattr(config, "sliding_window", None))


def asked_for(module: nn.Module, mask: object, kwargs: Mapping[str, Any]) -> Features:
    """The features in the arguments of an attention function. `Unsupported` where one is not known here."""
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise Unsupported(f"attention with {name}")
    if isinstance(mask, Tensor) or (isinstance(mask, Local) and mask.strange):
        raise Unsupported("an attention mask of its own")
    window, chunk = kwargs.get("sliding_window") or None, None
    if isinstance(mask, Local):
        window, chunk = (window, mask.size) if mask.chunked else (mask.size, None)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if window is None and chunk is None and softcap is None and sinks is None:
        return PLAIN
    return Features(window, chunk, softcap, sinks)


def weigh(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, features: Features
) -> Tensor:
    """Attention with a cap on the scores or with sinks: ``[batch, head, token]`` in and out."""
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
    """The longest row whose positions mean the same in every row, or None where there is no such bound.

    Positions by ``longrope`` and ``dynamic`` depend on the longest row of a pass: beyond their original
    length a token's log-prob would depend on what is computed beside it and on what follows it.
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
    """Windows and chunks that a configuration names."""
    found = [getattr(_text(config), name, None) for name in ("sliding_window", "attention_chunk_size")]
    return [size for size in found if isinstance(size, int)]


def unknown_layers(config: Any) -> list[str]:
    """Kinds of layers that keep more than keys and values, or choose among them in a way not known here."""
    config = _text(config)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    return sorted({str(kind) for kind in kinds} - KNOWN_LAYERS)


def unknown_beyond(config: Any) -> dict[str, int]:
    """Settings by which a model changes from some length on, with that length."""
    config = _text(config)
    found = {name: getattr(config, name, None) for name in _BEYOND}
    if not getattr(config, "attn_temperature_tuning", True):
        found.pop("floor_scale")
    return {name: value for name, value in found.items() if isinstance(value, int) and value > 0}
