"""Collectives with gradients, between states that all ranks of a group have and parts of them."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def sum_gradients(tensor: Tensor, group: Any) -> Tensor:
    """Return a tensor that all ranks have, whose gradients on them add up: each computes a part with it."""
    result: Tensor = cast(Any, _SumGradients).apply(tensor, group)
    return result


def sum_states(tensor: Tensor, group: Any) -> Tensor:
    """Return the sum of the ranks' tensors, of which all ranks compute the same afterwards."""
    result: Tensor = cast(Any, _SumStates).apply(tensor, group)
    return result


def gather_last(tensor: Tensor, group: Any, ranks: int, rank: int) -> Tensor:
    """Return the ranks' tensors side by side in the last dimension."""
    result: Tensor = cast(Any, _GatherLast).apply(tensor, group, ranks, rank)
    return result


def split_last(tensor: Tensor, group: Any, ranks: int, rank: int) -> Tensor:
    """Return this rank's part of the last dimension of a tensor that all ranks have."""
    result: Tensor = cast(Any, _SplitLast).apply(tensor, group, ranks, rank)
    return result


def exchange(tensor: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send so many rows to each rank, in order, and return the rows received from each, in order."""
    result: Tensor = cast(Any, _Exchange).apply(tensor, sent, received, group)
    return result


def scale_gradient(tensor: Tensor, factor: float) -> Tensor:
    """Return a tensor whose gradient is multiplied by a factor."""
    result: Tensor = cast(Any, _ScaleGradient).apply(tensor, factor)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(tensor, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _SumStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        return _all_reduce(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, ranks: int, rank: int) -> Tensor:
        ctx.ranks, ctx.rank = ranks, rank
        return _all_gather(tensor, group, ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].chunk(ctx.ranks, -1)[ctx.rank], None, None, None


class _SplitLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, ranks: int, rank: int) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return tensor.chunk(ranks, -1)[rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_gather(grads[0], ctx.group, ctx.ranks), None, None, None


def _all_reduce(tensor: Tensor, group: Any) -> Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_to_all(tensor: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    result = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(result, tensor.detach().contiguous(), received, sent, group=group)
    return result


def _all_gather(tensor: Tensor, group: Any, ranks: int) -> Tensor:
    local = tensor.detach().contiguous()
    received = [torch.empty_like(local) for _ in range(ranks)]
    dist.all_gather(received, local, group=group)
    return torch.cat(received, -1)
