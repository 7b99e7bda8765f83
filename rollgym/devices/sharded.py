"""What a rank of a sharded learner holds and gathers: FSDP2 over a mesh of devices.

FSDP2 cuts each parameter by its rows and pads them to a multiple of the ranks: a rank holds at least one row,
and a gathered unit is as large as all ranks' rows. So 128 experts on 512 ranks are gathered as 512.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollgym.devices.activations import saved_by_attention, saved_by_mlp
from rollgym.devices.models import ModelShape
from rollgym.devices.types import TrainMesh
from rollgym.devices.workload import Job

Matrix = tuple[int, int]
"""Rows and columns of a parameter."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together, such as those of a layer."""

    whole: int = 0
    """Parameters that a rank computes with: all of them, or its tensor or expert parallel part."""
    share: int = 0
    """Parameters that a rank holds, with padding."""
    gathered: int = 0
    """Parameters that arrive when it is gathered, with padding."""
    trained: int = 0
    """Trained parameters that a rank holds."""


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a model; with tied embeddings, these are in the root."""

    embedding: Unit
    layer: Unit
    head: Unit
    root: Unit
    share: int
    trained_share: int


def sharded_units(shape: ModelShape, mesh: TrainMesh, lora_rank: int | None = None) -> Units:
    """Return the units of a model that is sharded over a mesh."""
    trained = lora_rank is None
    width = [(-(-shape.vocab // mesh.tensor), shape.hidden)]
    end = _unit(width, [], mesh, trained)
    norm = [(shape.hidden, 1)]
    adapters = list(_adapters(shape, mesh, lora_rank)) if lora_rank is not None else []
    attention = list(_attention(shape, mesh))
    dense = _unit([*attention, *_mlp(shape, mesh)], adapters, mesh, trained)
    layer, moe = dense, 0
    if shape.experts:
        moe = shape.layers - shape.dense_layers
        layer = _unit([*attention, *_router(shape)], adapters, mesh, trained, _experts(shape, mesh))
    none = Unit()
    root = _unit(norm + width if shape.tied else norm, [], mesh, trained)
    ends = (none, none) if shape.tied else (end, end)
    units = [*ends, root]
    layers = moe if shape.experts else shape.layers
    rest = shape.layers - layers
    return Units(
        embedding=ends[0],
        layer=layer,
        head=ends[1],
        root=root if shape.tied else none,
        share=sum(unit.share for unit in units) + layers * layer.share + rest * dense.share,
        trained_share=sum(unit.trained for unit in units) + layers * layer.trained + rest * dense.trained,
    )


def _unit(
    matrices: list[Matrix],
    adapters: list[Matrix],
    mesh: TrainMesh,
    trained: bool,
    experts: Sequence[Matrix] = (),
) -> Unit:
    own = _share(matrices, mesh.shards)
    extra = _share(adapters, mesh.shards)
    of_experts = _share(experts, mesh.expert_shards)
    whole = sum(rows * columns for rows, columns in [*matrices, *adapters, *experts])
    return Unit(
        whole=whole,
        share=own + extra + of_experts,
        gathered=mesh.shards * (own + extra) + mesh.expert_shards * of_experts,
        trained=own + of_experts if trained else extra,
    )


def _share(matrices: Sequence[Matrix], ranks: int) -> int:
    return sum(-(-rows // ranks) * columns for rows, columns in matrices)


def _attention(shape: ModelShape, mesh: TrainMesh) -> Iterator[Matrix]:
    """Yield the parameters of a layer's attention and norms, of which a rank has its tensor parallel part."""
    h, t = shape.hidden, mesh.tensor
    q, kv = shape.heads * shape.head_dim // t, shape.kv_heads * shape.head_dim // t
    yield from [(q, h), (kv, h), (kv, h), (h, q), (h, 1), (h, 1)]
    if shape.qkv_bias:
        yield from [(q, 1), (kv, 1), (kv, 1)]
    if shape.out_bias:
        yield (h, 1)
    if shape.qk_norm:
        yield from [(shape.head_dim, 1)] * 2


def _mlp(shape: ModelShape, mesh: TrainMesh) -> Iterator[Matrix]:
    h, inner = shape.hidden, shape.inner // mesh.tensor
    yield from [(inner, h), (inner, h), (h, inner)]
    if shape.mlp_bias:
        yield from [(inner, 1), (inner, 1), (h, 1)]


def _router(shape: ModelShape) -> Iterator[Matrix]:
    """Yield the parameters beside the experts: the router and the shared expert."""
    h = shape.hidden
    yield (shape.experts, h)
    if shape.shared_inner:
        yield from [(shape.shared_inner, h), (shape.shared_inner, h), (h, shape.shared_inner), (1, h)]


def _experts(shape: ModelShape, mesh: TrainMesh) -> list[Matrix]:
    """Return the parameters of the experts that a rank computes."""
    count = shape.experts // mesh.expert
    return [(count, 2 * shape.expert_inner * shape.hidden), (count, shape.hidden * shape.expert_inner)]


def _adapters(shape: ModelShape, mesh: TrainMesh, rank: int) -> Iterator[Matrix]:
    """Yield the matrices of low rank beside the linear layers of a layer."""
    h, t = shape.hidden, mesh.tensor
    q, kv = shape.heads * shape.head_dim // t, shape.kv_heads * shape.head_dim // t
    yield from [(rank, h), (q, rank), (rank, h), (kv, rank), (rank, h), (kv, rank), (rank, q), (h, rank)]
    if shape.experts:
        count, expert = shape.experts // mesh.expert * rank, shape.expert_inner
        yield from [(count, h), (2 * expert, count), (count, expert), (h, count)]
    inner = shape.shared_inner if shape.experts else shape.inner // t
    if inner:
        yield from [(rank, h), (inner, rank), (rank, h), (inner, rank), (rank, inner), (h, rank)]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the activations of a micro-batch on a rank."""

    shape: ModelShape
    job: Job
    mesh: TrainMesh
    sharded: bool
    full: bool = True
    """Whether all weights are trained."""

    @property
    def c(self) -> int:
        """Bytes per number in the compute precision."""
        return self.job.bytes_each

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on this rank."""
        return -(-self.job.workload.microbatch(self.mesh.context) // self.mesh.context)

    @property
    def replies(self) -> int:
        """Tokens among them whose states predict an action token."""
        return round(self.tokens * self.job.workload.reply_share)

    @property
    def merged(self) -> int:
        """Experts' weights with their adapters added, which adapted layers compute with and save."""
        shape = self.shape
        if self.full or not shape.experts:
            return 0
        return self.c * shape.experts // self.mesh.expert * 3 * shape.hidden * shape.expert_inner

    @property
    def saved(self) -> int:
        """Saved at the end of a forward pass, by all layers and the last norm."""
        norm = (
            self.tokens * self.shape.hidden * (4 + self.c * self.full if self.c == 2 else 8 + 4 * self.full)
        )
        if self.job.workload.checkpointing:
            return self.shape.layers * self._checkpoint + norm
        return (self.shape.layers - 1) * self._layer + self._last_layer + norm

    @property
    def saved_forward(self) -> int:
        """Saved when the weights of the last layer have been gathered in a forward pass."""
        below = self.shape.layers - 1
        return below * (self._checkpoint if self.job.workload.checkpointing else self._layer)

    @property
    def saved_before_last(self) -> int:
        """Saved when the layer before the last one begins its backward pass."""
        below = self.shape.layers - 1
        if self.job.workload.checkpointing:
            return below * self._checkpoint + self._layer
        return below * self._layer

    @property
    def saved_first(self) -> int:
        """Saved when the first layer begins its backward pass."""
        return self._layer + (self._checkpoint if self.job.workload.checkpointing else 0)

    @property
    def recomputed_last(self) -> int:
        """Saved again when the last layer begins its backward pass."""
        return self._last_layer if self.job.workload.checkpointing else 0

    @property
    def forward_layer(self) -> int:
        """What a layer makes in a forward pass without gradients."""
        if self.shape.experts:
            return self.tokens * self.shape.experts_used * 4 * self.shape.hidden * self.c
        return self.tokens * 3 * (self.shape.hidden + self.shape.inner // self.mesh.tensor) * self.c

    def backward(self, gradient: int) -> int:
        """Extra memory of a layer's backward pass: what it makes beyond what is saved, less what it frees.

        ``gradient``: bytes of a gradient of a weight, in which the layer's gradients are counted elsewhere.
        """
        return self._backward(self.tokens, gradient)

    def backward_last(self, gradient: int) -> int:
        """The same of the last layer, whose MLP is computed for predicting tokens."""
        shape = self.shape
        heads = (shape.heads + shape.kv_heads) * shape.head_dim // self.mesh.tensor
        attention = self.tokens * (2 * self.c * heads + 8 * shape.hidden)
        return max(self._backward(self.replies, gradient), attention)

    def score_peak(self, units: Units, *, vocabulary: bool, chunk: int) -> tuple[int, int]:
        """Return gathered weights and activations of a pass without gradients at its fullest moment."""
        c, layer, start = self.c, units.layer, units.embedding
        head = units.head if vocabulary else Unit()
        states = self.tokens * self.shape.hidden * c
        moments = [
            (c * (start.gathered + 2 * layer.gathered), states),
            (c * 3 * layer.gathered, states),
            (c * (2 * layer.gathered), states + self.forward_layer),
            # Two of an expert's three matrices, merged, and what is added to them.
            (c * (2 * layer.gathered), states + 4 * self.merged // 3),
            (c * (layer.gathered + 2 * head.gathered), states),
            (c * (2 * head.gathered), states + chunk),
        ]
        gathered, activations = max(moments, key=sum)
        return c * units.root.gathered + gathered, activations

    @property
    def _checkpoint(self) -> int:
        return self.tokens * self.shape.hidden * (self.c if self.sharded else 4)

    @property
    def _attention(self) -> int:
        return self.tokens * saved_by_attention(
            self.shape, self.c, self.mesh, sharded=self.sharded, full=self.full
        )

    @property
    def _layer(self) -> int:
        mlp = self.tokens * saved_by_mlp(self.shape, self.c, self.mesh.tensor)
        return self._attention + mlp + self.merged

    @property
    def _last_layer(self) -> int:
        mlp = self.replies * saved_by_mlp(self.shape, self.c, self.mesh.tensor)
        return self._attention + mlp + self.merged

    def _backward(self, tokens: int, gradient: int) -> int:
        shape, c = self.shape, self.c
        states = 2 * self.tokens * shape.hidden * c
        if not shape.experts:
            return states + tokens * 4 * shape.inner // self.mesh.tensor * c
        used, inner = shape.experts_used * tokens * c, shape.expert_inner
        held = shape.experts // self.mesh.expert * 3 * shape.hidden * inner
        # At the end of the experts' backward pass, or before the gradient of two thirds of their weights.
        return states + max(-2 * used * inner, used * (shape.hidden + inner) - 2 * gradient * held // 3)
