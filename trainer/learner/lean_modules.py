"""Modules of a transformer for training in bfloat16 on a CPU: fewer casts, and fewer activations kept.

Autocast casts every weight in every micro-batch and every input once for each layer that reads it, and
autograd keeps all of these, the float32 states inside a norm, and both factors of a gated MLP. `make_lean`
replaces the forward of linear layers, norms before attention and MLP, gated MLPs and LoRA layers by functions
with the same results that keep only what the backward pass cannot compute cheaply. Weights are cast once in
an update. Without autocast to bfloat16, the modules compute as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORMS = ("input_layernorm", "post_attention_layernorm")
"""Norms whose results only linear layers read."""


class WeightCasts:
    """Weights in bfloat16, kept within `keep` and made for each use outside."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] | None = None

    def __call__(self, weight: Tensor) -> Tensor:
        """Return a weight in bfloat16, without gradient."""
        if self._kept is None or weight.dtype == torch.bfloat16:
            return weight.detach().to(torch.bfloat16)
        cast = self._kept.get(id(weight))
        if cast is None:
            cast = self._kept[id(weight)] = weight.detach().to(torch.bfloat16)
        return cast

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Keep the casts until the end: weights must not change meanwhile."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None


def make_lean(model: nn.Module) -> WeightCasts:
    """Replace the forward of a model's modules where that gives the same results; returns the casts."""
    casts = WeightCasts()
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            _replace(module, partial(_linear, module, casts))
        elif name.rpartition(".")[2] in NORMS and _is_rms_norm(module):
            _replace(module, partial(_norm, module, module.forward))
        elif _is_gated_mlp(module):
            _replace(module, partial(_gated_mlp, module, casts))
        elif _is_lora(module):
            _replace(module, partial(_lora, module, casts, module.forward))
    return casts


@torch.no_grad()
def shrink_frozen(model: nn.Module) -> None:
    """Keep the frozen weights of LoRA layers in bfloat16 where that loses nothing, as of models saved in it.

    Such a model must only be used under autocast; merged weights are float32.
    """
    module: Any
    for module in model.modules():
        if _is_lora(module):
            weight: Tensor = module.base_layer.weight
            small = weight.to(torch.bfloat16)
            if torch.equal(small.float(), weight):
                weight.data = small


def _replace(module: Any, forward: Any) -> None:
    module.forward = forward


def _in_bfloat16() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


# Linear layers.


def _linear(module: nn.Linear, casts: WeightCasts, x: Tensor) -> Tensor:
    if not _in_bfloat16():
        return F.linear(x, module.weight, module.bias)
    apply: Any = _Linear.apply
    result: Tensor = apply(x.to(torch.bfloat16), module.weight, module.bias, casts(module.weight))
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cast: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, cast)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return F.linear(x, cast, None if bias is None else bias.to(cast.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, cast = ctx.saved_tensors
        dtype, bias_dtype = ctx.dtypes
        x_grad = grads[0] @ cast if ctx.needs_input_grad[0] else None
        grad = grads[0].flatten(0, -2)
        weight_grad = (grad.T @ x.flatten(0, -2)).to(dtype) if ctx.needs_input_grad[1] else None
        bias_grad = grad.sum(0, dtype=torch.float32).to(bias_dtype) if ctx.needs_input_grad[2] else None
        return x_grad, weight_grad, bias_grad, None


# Norms.


def _norm(module: Any, plain: Any, x: Tensor) -> Tensor:
    apply: Any = _RMSNorm.apply
    lean = _in_bfloat16() and x.dtype == torch.float32
    result: Tensor = apply(x, module.weight, module.variance_epsilon) if lean else plain(x)
    return result


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad, normed = grads[0].float(), x * scale
        product = grad * normed
        weight_grad = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        mean = (product @ weight).div_(x.shape[-1])[..., None]
        x_grad = grad.mul_(weight).sub_(normed.mul_(mean)).mul_(scale)
        return x_grad, weight_grad, None


@torch.no_grad()
def _is_rms_norm(module: Any) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return False
    x = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(0))
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return torch.allclose(module(x), expected, rtol=1e-5, atol=1e-6)


# Gated MLPs.


def _gated_mlp(module: Any, casts: WeightCasts, x: Tensor) -> Tensor:
    gate, up, down = module.gate_proj(x), module.up_proj(x), module.down_proj
    apply: Any
    if not _in_bfloat16():
        result: Tensor = down(module.act_fn(gate) * up)
    elif type(down) is nn.Linear:
        apply = _GatedLinear.apply
        result = apply(gate, up, down.weight, down.bias, casts(down.weight))
    else:
        apply = _Gated.apply
        result = down(apply(gate, up))
    return result


def _gated_grads(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return _gated_grads(gate, up, grads[0])


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, cast: Tensor
    ) -> Tensor:
        ctx.save_for_backward(gate, up, cast)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return F.linear(F.silu(gate).mul_(up), cast, None if bias is None else bias.to(cast.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, cast = ctx.saved_tensors
        dtype, bias_dtype = ctx.dtypes
        grad = grads[0].flatten(0, -2)
        weight_grad = bias_grad = None
        if ctx.needs_input_grad[2]:
            weight_grad = (grad.T @ F.silu(gate).mul_(up).flatten(0, -2)).to(dtype)
        if ctx.needs_input_grad[3]:
            bias_grad = grad.sum(0, dtype=torch.float32).to(bias_dtype)
        return *_gated_grads(gate, up, grads[0] @ cast), weight_grad, bias_grad, None


@torch.no_grad()
def _is_gated_mlp(module: Any) -> bool:
    layers: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    gate, up, down = layers
    if not hasattr(module, "act_fn") or not all(
        isinstance(getattr(layer, "base_layer", layer), nn.Linear) for layer in layers
    ):
        return False
    x = torch.randn(2, gate.in_features, generator=torch.Generator().manual_seed(0))
    try:
        return torch.allclose(module(x), down(F.silu(gate(x)) * up(x)), rtol=1e-5, atol=1e-6)
    except (RuntimeError, TypeError):  # more arguments, or another way to use these layers
        return False


# LoRA layers of peft.


def _lora(module: Any, casts: WeightCasts, plain: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    names = [name for name in module.active_adapters if name in module.lora_A]
    result: Tensor
    if not _in_bfloat16() or module.disable_adapters or module.merged or len(names) != 1 or args or kwargs:
        result = plain(x, *args, **kwargs)
    else:
        a, b = module.lora_A[names[0]].weight, module.lora_B[names[0]].weight
        base, apply = module.base_layer, _LoraLinear.apply
        x = x.to(torch.bfloat16)
        result = apply(x, casts(base.weight), base.bias, a, b, module.scaling[names[0]])  # type: ignore[no-untyped-call]
    return result


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        low, high = a.to(x.dtype), b.to(x.dtype)
        inner = F.linear(x, low)
        ctx.save_for_backward(x, weight, low, high, inner)
        ctx.scaling = scaling
        result = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        return result.add_(F.linear(inner, high), alpha=scaling)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, low, high, inner = ctx.saved_tensors
        grad = grads[0]
        inner_grad = (grad @ high).mul_(ctx.scaling)
        x_grad = (grad @ weight).add_(inner_grad @ low) if ctx.needs_input_grad[0] else None
        a_grad = (inner_grad.flatten(0, -2).T @ x.flatten(0, -2)).float()
        b_grad = (grad.flatten(0, -2).T @ inner.flatten(0, -2)).float().mul_(ctx.scaling)
        return x_grad, None, None, a_grad, b_grad, None


def _is_lora(module: Any) -> bool:
    """Return whether a module is a linear layer with plain low-rank matrices beside it."""
    if type(getattr(module, "base_layer", None)) is not nn.Linear or not hasattr(module, "lora_A"):
        return False
    frozen = not any(parameter.requires_grad for parameter in module.base_layer.parameters())
    biased = any(layer.bias is not None for layer in module.lora_B.values())
    return frozen and not biased and not module.lora_variant
