"""A fused forward pass of Llama, Qwen2 and Qwen3 models.

A small model spends most of its time between kernels, not in them. This computes the same in a third of the
calls: query, key and value (and gate and up) are one matrix product each, and rotary tables are precomputed.
The module's parameters become views of the fused weights, so loading into the module loads here as well.
`Model` compares the result with the module's own forward before it is used.

A large model spends its time in products of a few rows with large matrices. The BLAS of torch reorders the
matrix in every such product, which takes longer than the product itself. On CPU, `FusedDecoder.pack` stores
the weights in the order of oneDNN's kernels instead. These also sum in one order for any number of rows, so a
batch of one needs no padding. Only the packed copy stays in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollgym.engines.embedded.attention import ForwardBatch, attend, write_kv

__all__ = ["FusedDecoder", "supports_fused"]

_MODEL_TYPES = ("llama", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_PACK_ROWS = 32
"""Typical number of rows, which oneDNN chooses the order of packed weights by."""
_SERIAL = 32_767
"""torch splits elementwise work on more numbers among threads, at offsets that depend on the total."""


def supports_fused(module: nn.Module, config: Any) -> bool:
    """Return True if `FusedDecoder` supports the model."""
    rope = getattr(config, "rope_parameters", None) or {}
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    return (
        config.model_type in _MODEL_TYPES
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _ROPE_TYPES
        and set(layers) == {"full_attention"}
        and hasattr(module, "lm_head")
    )


@dataclass(slots=True)
class _Linear:
    columns: Tensor
    """The transposed weights: faster for products of few rows. Without memory while packed, unless shared."""
    bias: Tensor | None
    parts: Sequence[Tensor] = ()
    """The parameters of the module that are views of ``columns``."""
    shared: bool = False
    """Whether the weights are used elsewhere, too: tied embeddings."""
    packed: Tensor | None = None
    """The weights in the order of oneDNN."""
    _loaded: set[int] = field(default_factory=set)
    """Parts that were overwritten since `open`."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return _onednn_linear(x, self.packed, self.bias)
        if self.bias is None:
            return torch.mm(x, self.columns)
        return torch.addmm(self.bias, x, self.columns)

    def pack(self) -> None:
        """Reorder the weights and free the original."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.columns.t().contiguous(), _PACK_ROWS)
        self._loaded.clear()
        storage = self.columns.untyped_storage()
        if not self.shared and storage.nbytes() == self.columns.numel() * self.columns.itemsize:
            storage.resize_(0)

    def open(self) -> None:
        """Allocate memory for the original weights; their content is undefined."""
        self.packed = None
        storage = self.columns.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.columns.numel() * self.columns.itemsize)

    def loaded(self, part: Tensor) -> None:
        """Pack again once all parts were overwritten."""
        self._loaded.add(id(part))
        if len(self._loaded) == len(self.parts):
            self.pack()


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalized states in the dtype of the weights, computed in that of the states."""
        weight = self.weight
        if x.dtype == weight.dtype:
            return torch.rms_norm(x, weight.shape, weight, self.eps)
        return torch.rms_norm(x, weight.shape, weight.to(x.dtype), self.eps).to(weight.dtype)


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in: _Norm
    qkv: _Linear
    q_norm: _Norm | None
    k_norm: _Norm | None
    out: _Linear
    norm_mid: _Norm
    gate_up: _Linear
    down: _Linear


_Turn = tuple[Tensor, Tensor]


class FusedDecoder:
    """Computes the logits of a `ForwardBatch`."""

    def __init__(self, module: Any, positions: int) -> None:
        base, config = module.model, module.config
        attention = base.layers[0].self_attn
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.embed: Tensor = base.embed_tokens.weight
        self.residual = torch.float32 if self.embed.device.type == "cpu" else self.embed.dtype
        """Dtype of the sums between layers. In bfloat16 they would lose more than all products do, and the
        learner's autocast has float32 there, too."""
        self.norm = _norm(base.norm)
        head = module.lm_head
        tied = head.weight is self.embed
        self.head = _Linear(head.weight.t(), head.bias, [head.weight], shared=tied)
        self.layers = [_layer(layer) for layer in base.layers]
        self.cos, self.sin = _rotary(base, positions, self.dim, self.embed)

    def __call__(self, batch: ForwardBatch, wanted: Tensor | None) -> Tensor:
        """Return the logits of the wanted rows (None: all); writes the rows' keys and values to the cache."""
        return self.head(self.states(batch, wanted))

    def states(self, batch: ForwardBatch, wanted: Tensor | None) -> Tensor:
        """Return the last hidden states of the wanted rows, which the output layer reads."""
        x = F.embedding(batch.ids, self.embed).to(self.residual)
        turn = self.cos[batch.positions], self.sin[batch.positions]
        for number, layer in enumerate(self.layers):
            x = x + self._attention(number, layer.norm_in(x), turn, batch)
            x = x + _mlp(layer, layer.norm_mid(x))
        if wanted is not None:
            x = x[wanted]
        return self.norm(x)

    @torch.no_grad()
    def pack(self) -> Mapping[int, _Linear]:
        """Pack all weights; returns the packed layers by the id of each of their parameters."""
        linears = list(self._linears())
        for linear in linears:
            linear.pack()
        return {id(part): linear for linear in linears for part in linear.parts}

    @torch.no_grad()
    def unpack(self) -> None:
        """Undo `pack`."""
        for linear in self._linears():
            if (packed := linear.packed) is not None:
                linear.open()
                linear.columns.copy_(packed.to_dense().t())

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights."""
        found = [linear.packed for linear in self._linears()]
        return sum(packed.numel() * packed.itemsize for packed in found if packed is not None)

    def release_packed(self) -> None:
        """Free the packed weights; they must be loaded again."""
        for linear in self._linears():
            linear.packed = None

    def _linears(self) -> Iterator[_Linear]:
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
        yield self.head

    def _attention(self, number: int, x: Tensor, turn: _Turn, batch: ForwardBatch) -> Tensor:
        layer = self.layers[number]
        count, heads, kv_heads, dim = len(x), self.heads, self.kv_heads, self.dim
        qkv = layer.qkv(x).view(count, -1, dim)
        # `narrow` instead of a slice: calling small operations takes half of the time.
        turned = qkv.narrow(1, 0, heads + kv_heads)
        if layer.q_norm is not None and layer.k_norm is not None:
            turned[:, :heads] = layer.q_norm(turned[:, :heads])
            turned[:, heads:] = layer.k_norm(turned[:, heads:])
        # The sine carries the sign of the half that is swapped in.
        swapped = turned.roll(dim // 2, -1).mul_(turn[1])
        turned.mul_(turn[0]).add_(swapped)
        write_kv(batch, number, qkv.narrow(1, heads, 2 * kv_heads).view(count, 2, kv_heads, dim))
        queries = qkv.narrow(1, 0, heads).view(count, kv_heads, -1, dim)
        return layer.out(attend(batch, number, queries, self.scale).reshape(count, -1))


def _mlp(layer: _Layer, x: Tensor) -> Tensor:
    both = layer.gate_up(x)
    width = both.shape[1] // 2
    gate, up = both.narrow(1, 0, width), both.narrow(1, width, width)
    if gate.device.type == "cpu" and gate.numel() > _SERIAL:
        # The exponential's last bit depends on where a thread's part ends, so use one thread.
        step = max(1, _SERIAL // width)
        for first in range(0, len(x), step):
            F.silu(gate[first : first + step], inplace=True)
    else:
        F.silu(gate, inplace=True)
    return layer.down(gate.mul_(up))


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        norm_in=_norm(layer.input_layernorm),
        qkv=_fuse([attention.q_proj, attention.k_proj, attention.v_proj]),
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        out=_fuse([attention.o_proj]),
        norm_mid=_norm(layer.post_attention_layernorm),
        gate_up=_fuse([mlp.gate_proj, mlp.up_proj]),
        down=_fuse([mlp.down_proj]),
    )


def _norm(norm: Any) -> _Norm:
    return _Norm(norm.weight, norm.variance_epsilon)


def _fuse(linears: Sequence[Any]) -> _Linear:
    """Fuse linear layers into one product; their parameters become views of the fused weights."""
    columns = _join([linear.weight.t() for linear in linears], 1)
    for linear, part in zip(linears, _parts(columns, linears, 1), strict=True):
        linear.weight.data = part.t()
    weights = [linear.weight for linear in linears]
    if linears[0].bias is None:
        return _Linear(columns, None, weights)
    bias = _join([linear.bias for linear in linears], 0)
    for linear, part in zip(linears, _parts(bias, linears, 0), strict=True):
        linear.bias.data = part
    return _Linear(columns, bias, weights)


@torch.no_grad()
def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat([part.data for part in parts], dim).contiguous()


def _parts(whole: Tensor, linears: Sequence[Any], dim: int) -> Sequence[Tensor]:
    return torch.split(whole, [linear.out_features for linear in linears], dim)


def _rotary(base: Any, positions: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine tables of all positions, ``[position, 1, dim]``."""
    at = torch.arange(positions, device=like.device)[None]
    cos, sin = base.rotary_emb(like, at)
    if cos.shape[-1] != dim:
        raise ValueError("the fused decoder does not support partial rotary embeddings")
    sin = torch.cat([-sin[..., : dim // 2], sin[..., dim // 2 :]], -1)
    return cos[0, :, None].contiguous(), sin[0, :, None].contiguous()
