"""Memory of a role on each of its devices, in bytes by purpose.

Training state is float32 in any compute precision: 4 bytes per parameter for weights, 4 for gradients and 8
for the two moments of Adam, divided by the data-parallel ranks as far as a ZeRO stage shards it. ZeRO-1 and
ZeRO-2 (DeepSpeed) store 4 more for each rank's share of the weights. That is 16 bytes without sharding, as in
the ZeRO paper (Rajbhandari et al. 2020, section 3.1). Computing in bfloat16 adds copies of the weights in
that precision (`cast_weights`).
Activations are those that the layers of transformers' Llama and Qwen save for the backward pass, with an
attention that stores no score matrix. All numbers are computed exactly; nothing is measured.
"""

from __future__ import annotations

from typing import Literal

from rollgym.devices.models import ModelShape
from rollgym.devices.workload import Job, Precision

Part = Literal["weights", "gradients", "optimizer", "activations", "kv_cache"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer", "activations", "kv_cache")
Sharding = Literal["none", "optimizer", "gradients", "weights"]
SHARDINGS: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "weights")

WEIGHT, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes per trained parameter."""
MASTER = 4
"""Bytes per parameter of a rank's master copy in ZeRO-1 and ZeRO-2."""
GATHERED = 2
"""Layers of sharded weights that are gathered at once: the current and the next one."""
PREFILL = 8192
"""Maximum number of prompt tokens per forward pass of an engine."""


def training_state(
    shape: ModelShape, ranks: int, sharding: Sharding, lora_rank: int | None = None
) -> dict[Part, int]:
    """Return the weights, gradients and optimizer state of a trained model on each rank."""
    every = shape.parameters
    trained = every if lora_rank is None else shape.lora_parameters(lora_rank)
    total = every if lora_rank is None else every + trained
    copied = ranks > 1 and sharding in ("optimizer", "gradients")
    optimizer = MOMENTS + (MASTER if copied else 0)
    return {
        "weights": scoring_weights(shape, WEIGHT, ranks, sharding) + WEIGHT * (total - every),
        "gradients": _share(GRADIENT * trained, ranks, sharding in ("gradients", "weights")),
        "optimizer": _share(optimizer * trained, ranks, sharding != "none"),
    }


def cast_weights(shape: ModelShape, precision: Precision, *, kept: bool) -> int:
    """Return the bytes of bfloat16 copies of float32 weights.

    With ``kept`` all copies are kept until the backward pass; else those of one layer at a time.
    """
    if precision == "float32":
        return 0
    read = 0 if shape.tied else shape.vocab * shape.hidden  # an embedding is looked up, not multiplied
    return 2 * (shape.parameters - read if kept else shape.largest_block)


def scoring_weights(shape: ModelShape, bytes_each: int, ranks: int, sharding: Sharding) -> int:
    """Return the weights on each rank, including gathered layers."""
    whole = bytes_each * shape.parameters
    if sharding != "weights" or ranks == 1:
        return whole
    return min(whole, _share(whole, ranks, True) + GATHERED * bytes_each * shape.largest_block)


def saved_by_layer(shape: ModelShape, bytes_each: int) -> int:
    """Return the bytes per token that one layer saves for the backward pass."""
    c, h = bytes_each, shape.hidden
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = (saved_by_norm(c, 3) + saved_by_norm(c, 2)) * h  # before queries, keys, values; before gate, up
    # Queries, keys, values, attention output, its transposed copy; a log-sum-exp per head.
    attention = (3 * q + 2 * kv) * c + 4 * shape.heads
    if shape.qk_norm:
        attention += (4 + c) * (q + kv)
    return norms + attention + saved_by_mlp(shape, bytes_each)


def saved_by_norm(bytes_each: int, readers: int) -> int:
    """Return the bytes per number that a norm and the linear layers reading it save.

    Hidden states are float32 in either precision. Each linear layer in bfloat16 reads its own copy.
    """
    return 3 * 4 if bytes_each == 4 else 2 * 4 + readers * bytes_each


def saved_by_mlp(shape: ModelShape, bytes_each: int) -> int:
    """Return the part of `saved_by_layer` that the MLP or the experts save."""
    c = bytes_each
    if not shape.experts:
        return 4 * shape.inner * c  # gate, its activation, up, their product
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
) -> int:
    """Return the bytes saved for the backward pass over ``tokens``, of which ``replies`` are predicted.

    The last layer's MLP is computed for predicting tokens only. Without ``vocabulary``, they predict values.
    """
    layer = saved_by_layer(shape, bytes_each)
    last = saved_by_norm(bytes_each, 1) * shape.hidden
    kept = shape.layers * shape.hidden * 4 if checkpointing else shape.layers * layer
    spared = 0 if checkpointing else (tokens - replies) * saved_by_mlp(shape, bytes_each)
    return tokens * (kept + last) - spared + (saved_by_head(shape, replies) if vocabulary else 0)


def update_activations(shape: ModelShape, job: Job, *, vocabulary: bool) -> int:
    """Return the peak of activations in an update: saved and temporary ones."""
    work, c = job.workload, job.bytes_each
    replies = round(work.longest * work.reply_share)
    saved = saved_activations(
        shape, c, work.longest, replies=replies, checkpointing=work.checkpointing, vocabulary=vocabulary
    )
    saved += cast_weights(shape, job.precision, kept=not work.checkpointing)
    layer = saved_by_layer(shape, c) * work.longest
    head = 2 * 4 * shape.vocab * replies if vocabulary else 0  # logits and their gradient
    return saved + max(head, layer if work.checkpointing else layer // 2)


def score_activations(shape: ModelShape, job: Job, *, vocabulary: bool) -> int:
    """Return the peak of activations in a forward pass without gradients."""
    work, c = job.workload, job.bytes_each
    replies = round(work.longest * work.reply_share) if vocabulary else 0
    inner = max(shape.inner, shape.experts_used * shape.expert_inner)
    layer = work.longest * (3 * shape.hidden + 3 * inner) * c
    cast = cast_weights(shape, job.precision, kept=False)
    return cast + max(layer, 3 * 4 * shape.vocab * replies + work.longest * shape.hidden * c)


def engine_weights(shape: ModelShape, job: Job, tensor_parallel: int) -> int:
    """Return the weights of an engine on each device."""
    return _share(job.bytes_each * shape.parameters, tensor_parallel, True)


def engine_workspace(shape: ModelShape, job: Job, tensor_parallel: int) -> int:
    """Return the workspace of an engine: a prefill chunk, and the logits of a decoding batch."""
    tokens = min(PREFILL, job.workload.context)
    inner = max(shape.inner, shape.experts_used * shape.expert_inner)
    width = 3 * shape.hidden + 3 * inner // tensor_parallel
    return tokens * width * job.bytes_each + 2 * 4 * shape.vocab * min(job.workload.in_flight, 256)


def kv_bytes(shape: ModelShape, job: Job, tensor_parallel: int) -> int:
    """Return the KV cache of one token on each device; heads are split, down to one per device."""
    heads = -(-shape.kv_heads // tensor_parallel)
    return 2 * shape.layers * heads * shape.head_dim * job.bytes_each


def _share(whole: int, ranks: int, sharded: bool) -> int:
    return -(-whole // ranks) if sharded else whole
