"""Bytes that the layers of a model save for the backward pass.

Counted over the operations of transformers' Llama, Qwen2, Qwen3 and their mixtures of experts, with an
attention that stores no score matrix. ``sharded``: FSDP2 casts the weights, and hidden states are in the
compute precision; otherwise autocast casts the inputs and weights of products, and they are float32.
"""

from __future__ import annotations

import math

from rollgym.devices.models import ModelShape
from rollgym.devices.types import TrainMesh


def saved_by_layer(shape: ModelShape, bytes_each: int) -> int:
    """Return the bytes per token that one layer saves for the backward pass, with autocast."""
    return saved_by_attention(shape, bytes_each) + saved_by_mlp(shape, bytes_each)


def saved_by_attention(
    shape: ModelShape,
    bytes_each: int,
    mesh: TrainMesh | None = None,
    *,
    sharded: bool = False,
    full: bool = True,
) -> int:
    """Return the part of `saved_by_layer` that both norms and the attention save.

    ``full``: all weights are trained; a frozen norm saves no normalized states.
    """
    mesh = mesh or TrainMesh()
    c, h = bytes_each, shape.hidden
    heads, kv_heads = shape.heads // mesh.tensor, shape.kv_heads // mesh.tensor
    q, kv = heads * shape.head_dim, kv_heads * shape.head_dim
    # Context parallel ranks share heads: key and value heads are repeated until each rank has some.
    held = math.lcm(kv_heads, mesh.context) * shape.head_dim
    # Before queries, keys, values; before gate, up.
    norms = sum(saved_by_norm(c, readers, sharded=sharded, full=full) for readers in (3, 2)) * h
    # Queries, keys, values, attention output, its transposed copy; a log-sum-exp per head.
    attention = (3 * q + 2 * held) * c + 4 * heads
    if shape.qk_norm:
        attention += (4 + c * full) * (q + kv)
    return norms + attention


def saved_by_norm(bytes_each: int, readers: int, *, sharded: bool = False, full: bool = True) -> int:
    """Return the bytes per number that a norm and the linear layers reading it save.

    With autocast, hidden states are float32 in either precision, and each linear layer reads its own copy.
    """
    if bytes_each == 4:
        return 2 * 4 + 4 * full
    if sharded:
        return 4 + 2 + 2 * full
    return 4 + 4 * full + readers * bytes_each


def saved_by_mlp(shape: ModelShape, bytes_each: int, tensor: int = 1) -> int:
    """Return the part of `saved_by_layer` that the MLP or the experts save."""
    c = bytes_each
    if not shape.experts:
        return 4 * shape.inner // tensor * c  # gate, its activation, up, their product
    used = shape.experts_used * (4 * shape.expert_inner + 2 * shape.hidden) * c + 4 * shape.shared_inner * c
    return used + 2 * 4 * shape.experts


def saved_by_head(shape: ModelShape, tokens: int) -> int:
    """Return the bytes saved for log-probs and entropy: two float32 vocabularies per token."""
    return 2 * 4 * shape.vocab * tokens


def saved_activations(
    shape: ModelShape,
    bytes_each: int,
    tokens: int,
    *,
    replies: int,
    checkpointing: bool,
    vocabulary: bool = True,
    full: bool = True,
) -> int:
    """Return the bytes that are saved with autocast over ``tokens``, of which ``replies`` are predicted.

    The last layer's MLP is computed for predicting tokens only. Without ``vocabulary``, nothing is saved for
    logits: they predict values, or logits are computed in chunks.
    """
    layer = saved_by_attention(shape, bytes_each, full=full) + saved_by_mlp(shape, bytes_each)
    last = saved_by_norm(bytes_each, 1, full=full) * shape.hidden
    kept = shape.layers * shape.hidden * 4 if checkpointing else shape.layers * layer
    spared = 0 if checkpointing else (tokens - replies) * saved_by_mlp(shape, bytes_each)
    return tokens * (kept + last) - spared + (saved_by_head(shape, replies) if vocabulary else 0)
