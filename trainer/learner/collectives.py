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


def _all_gather(tensor: Tensor, group: Any, ranks: int) -> Tensor:
    local = tensor.detach().contiguous()
    received = [torch.empty_like(local) for _ in range(ranks)]
    dist.all_gather(received, local, group=group)
    return torch.cat(received, -1)
