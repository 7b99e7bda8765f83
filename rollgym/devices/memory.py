"""How many bytes a role needs on each of its devices, by what they are for.

Training state is what the learners keep, which is float32 whatever they compute in: 4 bytes a parameter for
weights, 4 for gradients and 8 for the two moments of Adam, divided by the data-parallel ranks as far as a
stage shards it. ZeRO-1 and ZeRO-2 (DeepSpeed) keep 4 more for each rank's share of the weights. That is 16 in
all where nothing is sharded, as in the ZeRO paper (Rajbhandari et al. 2020, section 3.1). Computing in
bfloat16 adds copies of the weights in that precision (`cast_weights`).
Activations are what the layers of transformers' Llama and Qwen save for the backward pass, with attention
that keeps no matrix of scores. Nothing here rounds, and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rollgym.devices.job import Job, Precision
from rollgym.devices.models import ModelShape

Part = Literal["weights", "gradients", "optimiser", "activations", "kv_cache"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimiser", "activations", "kv_cache")
Sharding = Literal["none", "optimiser", "gradients", "weights"]
SHARDINGS: tuple[Sharding, ...] = ("none", "optimiser", "gradients", "weights")
Bytes = Mapping[Part, int]

WEIGHT, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes a parameter that is trained."""
MASTER = 4
"""Bytes a parameter of the copy of its share that a rank of ZeRO-1 or ZeRO-2 steps on."""
GATHERED = 2
"""Layers that sharded weights are whole of at once: the one at work, and the next."""
PREFILL = 8192
"""Tokens of prompts that an engine computes at once, at most."""


def training_state(
    shape: ModelShape, ranks: int, sharding: Sharding, lora_rank: int | None = None
) -> dict[Part, int]:
    """Weights, gradients and optimiser state of a model that is trained, on each rank."""
    every = shape.parameters
    trained = every if lora_rank is None else shape.lora_parameters(lora_rank)
    total = every if lora_rank is None else every + trained
    copied = ranks > 1 and sharding in ("optimiser", "gradients")
    optimiser = MOMENTS + (MASTER if copied else 0)
    return {
        "weights": scoring_weights(shape, WEIGHT, ranks, sharding) + WEIGHT * (total - every),
        "gradients": _share(GRADIENT * trained, ranks, sharding in ("gradients", "weights")),
        "optimiser": _share(optimiser * trained, ranks, sharding != "none"),
    }


def cast_weights(shape: ModelShape, precision: Precision, *, kept: bool) -> int:
    """Bytes of the copies that computing in bfloat16 makes of float32 weights.

    Args:
        shape: The model.
        precision: In which it is computed.
        kept: Whether all copies stay until the backward pass; else one layer has them at a time.
    """
    if precision == "float32":
        return 0
    read = 0 if shape.tied else shape.vocab * shape.hidden  # an embedding is looked up, not multiplied
    return 2 * (shape.parameters - read if kept else shape.largest_block)


def scoring_weights(shape: ModelShape, bytes_each: int, ranks: int, sharding: Sharding) -> int:
    """Weights on each rank, with the layers that are gathered while they are used."""
    whole = bytes_each * shape.parameters
    if sharding != "weights" or ranks == 1:
        return whole
    return min(whole, _share(whole, ranks, True) + GATHERED * bytes_each * shape.largest_block)


def saved_by_layer(shape: ModelShape, bytes_each: int) -> int:
    """Bytes that one layer saves for each token until the backward pass."""
    c, h = bytes_each, shape.hidden
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = (saved_by_norm(c, 3) + saved_by_norm(c, 2)) * h  # before queries, keys, values; before gate, up
    # Queries, keys, values, what attention gives, and that in the order of tokens; a sum for each head.
    attention = (3 * q + 2 * kv) * c + 4 * shape.heads
    if shape.qk_norm:
        attention += (4 + c) * (q + kv)
    return norms + attention + saved_by_mlp(shape, bytes_each)


def saved_by_norm(bytes_each: int, readers: int) -> int:
    """Bytes that a norm and the matrices that read it save for each number.

    States are float32 in either precision. Each matrix that computes in bfloat16 reads a copy of its own.
    """
    return 3 * 4 if bytes_each == 4 else 2 * 4 + readers * bytes_each


def saved_by_mlp(shape: ModelShape, bytes_each: int) -> int:
    """Of that, what the MLP or the experts save."""
    c = bytes_each
    if not shape.experts:
        return 4 * shape.inner * c  # gate, its activation, up, their product
    used = shape.experts_used * (4 * shape.expert_inner + 2 * shape.hidden) * c + 4 * shape.shared_inner * c
    return used + 2 * 4 * shape.experts


def saved_by_head(shape: ModelShape, tokens: int) -> int:
    """Bytes that log-probs and entropy of so many tokens save: two float32 vocabularies each."""
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
    """All that is saved for the backward pass over ``tokens``, of which ``replies`` are predicted.

    The last layer's MLP sees only those that predict. Without ``vocabulary`` it is values that they predict.
    """
    layer = saved_by_layer(shape, bytes_each)
    last = saved_by_norm(bytes_each, 1) * shape.hidden
    kept = shape.layers * shape.hidden * 4 if checkpointing else shape.layers * layer
    spared = 0 if checkpointing else (tokens - replies) * saved_by_mlp(shape, bytes_each)
    return tokens * (kept + last) - spared + (saved_by_head(shape, replies) if vocabulary else 0)


def update_activations(shape: ModelShape, job: Job, *, vocabulary: bool) -> int:
    """The most that activations take in an update: what is saved, and what exists only for a moment."""
    work, c = job.work, job.bytes_each
    replies = round(work.longest * work.reply_share)
    saved = saved_activations(
        shape,
        c,
        work.longest,
        replies=replies,
        checkpointing=work.checkpointing,
        vocabulary=vocabulary,
    )
    saved += cast_weights(shape, job.precision, kept=not work.checkpointing)
    layer = saved_by_layer(shape, c) * work.longest
    head = 2 * 4 * shape.vocab * replies if vocabulary else 0  # logits and their gradient
    return saved + max(head, layer if work.checkpointing else layer // 2)


def score_activations(shape: ModelShape, job: Job, *, vocabulary: bool) -> int:
    """The most that a pass without gradients takes."""
    work, c = job.work, job.bytes_each
    replies = round(work.longest * work.reply_share) if vocabulary else 0
    inner = max(shape.inner, shape.experts_used * shape.expert_inner)
    layer = work.longest * (3 * shape.hidden + 3 * inner) * c
    cast = cast_weights(shape, job.precision, kept=False)
    return cast + max(layer, 3 * 4 * shape.vocab * replies + work.longest * shape.hidden * c)


def engine_weights(shape: ModelShape, job: Job, tensor_parallel: int) -> int:
    """Weights of an engine on each device."""
    return _share(job.bytes_each * shape.parameters, tensor_parallel, True)


def engine_workspace(shape: ModelShape, job: Job, tensor_parallel: int) -> int:
    """What an engine computes with: a piece of a prompt, and the logits of all that it writes at once."""
    tokens = min(PREFILL, job.work.context)
    inner = max(shape.inner, shape.experts_used * shape.expert_inner)
    width = 3 * shape.hidden + 3 * inner // tensor_parallel
    return tokens * width * job.bytes_each + 2 * 4 * shape.vocab * min(job.work.in_flight, 256)


def kv_bytes(shape: ModelShape, job: Job, tensor_parallel: int) -> int:
    """Keys and values of one token on each device; heads are shared out, down to one each."""
    heads = -(-shape.kv_heads // tensor_parallel)
    return 2 * shape.layers * heads * shape.head_dim * job.bytes_each


def _share(whole: int, ranks: int, sharded: bool) -> int:
    return -(-whole // ranks) if sharded else whole
