"""Memory of a role on each of its devices, in bytes by purpose.

Training state is float32 in any compute precision: 4 bytes per parameter for weights, 4 for gradients and 8
for the two moments of Adam, divided by the data-parallel ranks as far as a ZeRO stage shards it. ZeRO-1 and
ZeRO-2 (DeepSpeed) store 4 more for each rank's share of the weights, DDP 4 more for what it sends. That is 16
bytes without sharding, as in the ZeRO paper (Rajbhandari et al. 2020, section 3.1).

Activations are those that the layers of transformers' Llama and Qwen save for the backward pass, with an
attention that stores no score matrix. They depend on how the learner computes in bfloat16: FSDP2 casts the
weights that it gathers (`sharded`), every other strategy casts inputs and weights of each product (autocast).
All numbers are computed; `rollgym plan --simulate` compares them with the learner itself.
"""

from __future__ import annotations

from typing import Literal

from rollgym.devices.activations import saved_activations, saved_by_head, saved_by_layer
from rollgym.devices.models import ModelShape
from rollgym.devices.sharded import Sizes, Unit, sharded_units
from rollgym.devices.types import TrainMesh
from rollgym.devices.workload import Job, Precision

Part = Literal["weights", "gradients", "optimizer", "activations", "kv_cache"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer", "activations", "kv_cache")
Sharding = Literal["none", "optimizer", "gradients", "weights"]
SHARDINGS: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "weights")

WEIGHT, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes per trained parameter."""
MASTER = 4
"""Bytes per parameter of a rank's master copy in ZeRO-1 and ZeRO-2."""
BUCKET = 4
"""Bytes per trained parameter that DDP copies gradients to."""
CHUNK, CHUNK_BYTES = 2**24, 112 * 2**20
"""Logits above which log-probs are computed in chunks, and the bytes of a chunk's tensors."""
PREFILL = 8192
"""Maximum number of prompt tokens per forward pass of an engine."""


def training_state(
    shape: ModelShape, mesh: TrainMesh, sharding: Sharding, lora_rank: int | None = None
) -> dict[Part, int]:
    """Return the weights, gradients and optimizer state of a trained model on each rank."""
    if sharding == "weights" and mesh.ranks > 1:
        units = sharded_units(shape, mesh, lora_rank)
        trained = units.trained_share
        return {
            "weights": WEIGHT * units.share,
            "gradients": GRADIENT * trained,
            "optimizer": MOMENTS * trained,
        }
    ranks = mesh.ranks
    every = shape.parameters
    trained = every if lora_rank is None else shape.lora_parameters(lora_rank)
    total = every if lora_rank is None else every + trained
    copied = ranks > 1 and sharding in ("optimizer", "gradients")
    optimizer = MOMENTS + (MASTER if copied else 0)
    return {
        "weights": WEIGHT * total,
        "gradients": _share(GRADIENT * trained, ranks, sharding == "gradients"),
        "optimizer": _share(optimizer * trained, ranks, sharding != "none"),
    }


def held_weights(shape: ModelShape, bytes_each: int, mesh: TrainMesh, sharding: Sharding) -> int:
    """Return the weights of a model that is not trained, on each rank, while it does not compute."""
    if sharding != "weights" or mesh.ranks == 1:
        return bytes_each * shape.parameters
    return bytes_each * sharded_units(shape, mesh).share


def update_memory(
    shape: ModelShape,
    job: Job,
    mesh: TrainMesh,
    sharding: Sharding,
    lora_rank: int | None,
    *,
    vocabulary: bool,
) -> dict[Part, int]:
    """Return the memory of each rank at the fullest moment of an update.

    Gradients of an earlier micro-batch are there. ``vocabulary``: false for a critic, which predicts values.
    """
    state = training_state(shape, mesh, sharding, lora_rank)
    if sharding == "weights" and mesh.ranks > 1:
        peak = _sharded_update(shape, job, mesh, lora_rank, vocabulary=vocabulary)
        return {
            **state,
            "weights": state["weights"] + peak["weights"],
            "gradients": state["gradients"] + peak["gradients"],
            "activations": peak["activations"],
        }
    if mesh.ranks > 1 and sharding == "none":
        state["gradients"] += BUCKET * state["gradients"] // GRADIENT
    full = lora_rank is None
    return {**state, "activations": _update_activations(shape, job, vocabulary, full)}


def score_memory(
    shape: ModelShape,
    job: Job,
    bytes_each: int,
    mesh: TrainMesh,
    sharding: Sharding,
    lora_rank: int | None = None,
    *,
    vocabulary: bool,
) -> dict[Part, int]:
    """Return the weights and activations of each rank at the fullest moment of a pass without gradients."""
    held = held_weights(shape, bytes_each, mesh, sharding)
    sharded = sharding == "weights" and mesh.ranks > 1
    sizes = Sizes(shape, job, mesh, sharded=sharded, full=lora_rank is None)
    if sharded:
        units, chunk = sharded_units(shape, mesh, lora_rank), _chunk(sizes)
        gathered, activations = sizes.score_peak(units, vocabulary=vocabulary, chunk=chunk)
        return {"weights": held + gathered, "activations": activations}
    cast = cast_weights(shape, job.precision, kept=False)
    head = _chunk(sizes) if vocabulary else 0
    if vocabulary and not _chunks(sizes):
        head = 3 * 4 * shape.vocab * sizes.replies
    activations = max(sizes.forward_layer, head + sizes.tokens * shape.hidden * sizes.c)
    return {"weights": held, "activations": cast + activations}


def _sharded_update(
    shape: ModelShape, job: Job, mesh: TrainMesh, lora_rank: int | None, *, vocabulary: bool
) -> dict[str, int]:
    """Return the largest sum of gathered weights, gradients before they are sharded, and activations.

    While a unit is in its backward pass, FSDP2 holds its weights, its gradients in the compute precision, the
    float32 gradients of the unit before, which are being summed over ranks, and the weights of the unit
    after, which are being gathered. Each moment below is the fullest one of a unit.
    """
    sizes = Sizes(shape, job, mesh, sharded=True, full=lora_rank is None)
    units = sharded_units(shape, mesh, lora_rank)
    c, layer, start, head = sizes.c, units.layer, units.embedding, units.head
    if not vocabulary:
        head = Unit()
    full = lora_rank is None
    g, r = (c, GRADIENT) if full else (0, 0)
    chunk = _chunk(sizes) if vocabulary else 0
    saved = sizes.saved
    before_last = sizes.saved_before_last + sizes.backward(g)
    last = saved + sizes.recomputed_last + sizes.backward_last(g)
    if vocabulary and not _chunks(sizes):
        saved += saved_by_head(shape, sizes.replies) // mesh.tensor
        chunk = 2 * 4 * shape.vocab * sizes.replies // mesh.tensor
    own = g * layer.whole + sizes.merged // 3  # of merged experts, the gradient of one matrix in three
    root = c * units.root.gathered  # tied embeddings are whole from the first layer to the last
    moments = [
        # Forward into the head: the layer's buffer, the head's, and its weights.
        (c * (layer.gathered + 2 * head.gathered), 0, saved),
        (c * 2 * head.gathered, 0, saved + chunk),
        (c * 3 * layer.gathered, 0, sizes.saved_forward),
        # The head's gradient is summed over chunks in float32, to which products are added.
        (c * (head.gathered + layer.gathered), (g + r) * (head.whole or units.root.whole), saved + chunk),
        (c * 2 * layer.gathered, own + r * head.gathered, last),
        (c * 2 * layer.gathered, own + r * layer.gathered, before_last),
        (
            c * (layer.gathered + start.gathered),
            own + r * layer.gathered,
            sizes.saved_first + sizes.backward(g),
        ),
        (c * start.gathered, g * start.whole + r * layer.gathered, 0),
        (0, g * start.whole + r * start.gathered, 0),
        (0, (2 * g + r) * units.root.gathered + r * layer.gathered * shape.tied, 0),
    ]
    weights, gradients, activations = max(moments, key=sum)
    return {"weights": root + weights, "gradients": gradients, "activations": activations}


def _update_activations(shape: ModelShape, job: Job, vocabulary: bool, full: bool) -> int:
    """Return the peak of activations in an update without sharded weights: saved and temporary ones."""
    work = job.workload
    sizes = Sizes(shape, job, TrainMesh(), sharded=False)
    saved = saved_activations(
        shape,
        sizes.c,
        work.longest,
        replies=sizes.replies,
        checkpointing=work.checkpointing,
        vocabulary=vocabulary and not _chunks(sizes),
        full=full,
    )
    saved += cast_weights(shape, job.precision, kept=not work.checkpointing)
    layer = sizes.backward(GRADIENT) + (
        saved_by_layer(shape, sizes.c) * work.longest if work.checkpointing else 0
    )
    head = 0
    if vocabulary and _chunks(sizes):
        width = shape.vocab * shape.hidden
        head = CHUNK_BYTES + (GRADIENT * width * full if sizes.c == 4 else 6 * width * full)
    elif vocabulary:
        head = 2 * 4 * shape.vocab * sizes.replies  # logits and their gradient
    return saved + max(head, layer)


def _chunks(sizes: Sizes) -> bool:
    """Return whether logits are computed in chunks, in a forward and again in a backward pass."""
    return sizes.replies * sizes.shape.vocab > CHUNK


def _chunk(sizes: Sizes) -> int:
    return CHUNK_BYTES if _chunks(sizes) else 0


def cast_weights(shape: ModelShape, precision: Precision, *, kept: bool) -> int:
    """Return the bytes of bfloat16 copies of float32 weights that autocast makes.

    With ``kept`` all copies are kept until the backward pass; else those of one layer at a time.
    """
    if precision == "float32":
        return 0
    read = 0 if shape.tied else shape.vocab * shape.hidden  # an embedding is looked up, not multiplied
    return 2 * (shape.parameters - read if kept else shape.largest_block)


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
