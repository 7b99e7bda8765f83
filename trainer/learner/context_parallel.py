"""Context parallelism: ranks hold slices of the tokens of a micro-batch, and exchange tokens for heads.

The ranks of a context group take the same rows. Each computes a slice of the packed tokens through all
layers. Attention needs whole rows: before it, an all-to-all gives each rank all tokens of some heads; after
it, another returns all heads of the rank's tokens (DeepSpeed-Ulysses, arXiv 2309.14509). Key and value heads
are repeated as often as it takes for every rank to get some.

Every rank returns the log-probs of all action tokens, collected over the ranks, and computes the same loss
from them. Gradients of parameters are then those of the own tokens: they are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rollgym.core.errors import UsageError
from rollgym.trainer.data.sequences import IntArray


class ContextGroup:
    """The ranks that share the tokens of a micro-batch, in the order of their slices."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def slice_of(self, num_tokens: int) -> ContextSlice:
        """Return this rank's slice of so many packed tokens."""
        return ContextSlice(self, num_tokens, -(-num_tokens // self.size))

    def collect(self, values: Tensor, own: IntArray, count: int) -> Tensor:
        """Return the values of all ranks, of which these are at some indices; gradients stay on each rank."""
        at = torch.from_numpy(own).to(values.device)
        apply: Any = _Collect.apply
        result: Tensor = apply(values, at, count, self.group)
        return result


def check_heads(name: str, heads: int, ranks: int) -> None:
    """Raise `UsageError` where so many attention heads cannot be shared by the ranks of a context group."""
    if heads % ranks:
        raise UsageError(
            f"{name} has {heads} attention heads on a rank, which learner.parallel.context = {ranks} does "
            f"not divide: choose a divisor of {heads}."
        )


@dataclass(frozen=True, slots=True, eq=False)
class ContextSlice:
    """A rank's slice of the packed tokens of a micro-batch; the last slices are filled up with tokens 0."""

    context: ContextGroup
    num_tokens: int
    """Packed tokens of the micro-batch."""
    size: int
    """Tokens of a slice."""

    @property
    def start(self) -> int:
        """Index of the first token of this slice among all."""
        return self.context.rank * self.size

    def take(self, numbers: IntArray) -> IntArray:
        """Return the numbers of the own tokens from those of all."""
        own = numbers[self.start : self.start + self.size]
        return np.concatenate([own, np.zeros(self.size - len(own), dtype=own.dtype)])

    def holds(self, tokens: IntArray) -> IntArray:
        """Return which of some tokens are in this slice, as indices into ``tokens``."""
        return np.flatnonzero((tokens >= self.start) & (tokens < self.start + self.size))

    def own_heads(self, values: Tensor) -> Tensor:
        """Return this rank's part of one value for each head."""
        return values.chunk(self.context.size)[self.context.rank]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Exchange all heads of the own tokens for all tokens of the own heads: ``[1, head, token, dim]``."""
        ranks, heads, shared = self.context.size, query.shape[1], key.shape[1]
        check_heads("An attention layer", heads, ranks)
        if shared % ranks:
            again = ranks // gcd(shared, ranks)
            key, value = key.repeat_interleave(again, 1), value.repeat_interleave(again, 1)
        apply: Any = _ToHeads.apply
        result: Sequence[Tensor] = apply(self, query, key, value)
        return result

    def to_tokens(self, attended: Tensor) -> Tensor:
        """Exchange all tokens of the own heads for all heads of the own tokens: ``[1, token, head, dim]``."""
        apply: Any = _ToTokens.apply
        result: Tensor = apply(self, attended)
        return result

    # One exchange for all tensors, whose order would otherwise have to be the same on all ranks.

    def _gather_tokens(self, states: Sequence[Tensor]) -> list[Tensor]:
        """All heads of the own tokens to all tokens of the own heads: ``[head, token, dim]``."""
        ranks = self.context.size
        parts = [one.reshape(ranks, -1) for one in states]
        received = self._all_to_all(torch.cat(parts, 1))
        results = []
        for one, part in zip(states, _split(received, parts), strict=True):
            heads, width = one.shape[0] // ranks, one.shape[2]
            by_rank = part.reshape(ranks, heads, self.size, width)
            whole = by_rank.transpose(0, 1).reshape(heads, ranks * self.size, width)
            results.append(whole[:, : self.num_tokens])
        return results

    def _scatter_tokens(self, states: Sequence[Tensor]) -> list[Tensor]:
        """The inverse of `_gather_tokens`."""
        ranks = self.context.size
        missing = ranks * self.size - self.num_tokens
        parts = []
        for one in states:
            filled = torch.nn.functional.pad(one, (0, 0, 0, missing)) if missing else one
            by_rank = filled.reshape(len(one), ranks, self.size, one.shape[2]).transpose(0, 1)
            parts.append(by_rank.reshape(ranks, -1))
        received = self._all_to_all(torch.cat(parts, 1))
        return [
            part.reshape(ranks * len(one), self.size, one.shape[2])
            for one, part in zip(states, _split(received, parts), strict=True)
        ]

    def _all_to_all(self, parts: Tensor) -> Tensor:
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.context.group)
        return received


def _split(together: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Undo the concatenation of parts."""
    return torch.split(together, [part.shape[1] for part in parts], 1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: ContextSlice, *states: Tensor) -> tuple[Tensor, ...]:
        ctx.own = own
        return tuple(whole[None] for whole in own._gather_tokens([one[0] for one in states]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(part[None] for part in ctx.own._scatter_tokens([grad[0] for grad in grads]))


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: ContextSlice, attended: Tensor) -> Tensor:
        ctx.own = own
        (part,) = own._scatter_tokens([attended[0].transpose(0, 1)])
        return part.transpose(0, 1)[None].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (whole,) = ctx.own._gather_tokens([grads[0][0].transpose(0, 1)])
        return None, whole.transpose(0, 1)[None].contiguous()


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, at: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(at)
        everything = values.new_zeros(count, *values.shape[1:]).index_copy_(0, at, values)
        dist.all_reduce(everything, group=group)
        return everything

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Every rank computes the same loss: the gradient of all tokens is here, and not to be summed.
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None, None
