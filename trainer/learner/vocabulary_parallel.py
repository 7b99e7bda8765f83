"""Log-probs and entropy over a vocabulary that is split over ranks: no rank has the logits of all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollgym.trainer.learner.collectives import sum_gradients, sum_states

_MARK = "_rollgym_vocabulary"


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyPart:
    """The tokens whose logits an output layer computes on this rank; the group's ranks have all of them."""

    group: Any
    start: int
    """Id of the first token."""


def vocabulary_part(head: Any) -> VocabularyPart | None:
    """Return this rank's part of the vocabulary of an output layer; None if it has all of it."""
    part: VocabularyPart | None = getattr(head, _MARK, None)
    return part


def mark(head: Any, part: VocabularyPart) -> None:
    """Note this rank's part of the vocabulary of an output layer."""
    setattr(head, _MARK, part)


def local_part(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor, with gradients; other tensors are returned as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def combine(
    normalizers: Tensor, entropy: Tensor, logits: Tensor, part: VocabularyPart
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalizers and entropies of all tokens, and the logits of targets, from those of parts.

    Args:
        normalizers: [N] log-sum-exp of this rank's logits.
        entropy: [N] entropy of the distributions over this rank's tokens alone.
        logits: [M] logits of the targets; 0 for those of other ranks.
        part: This rank's part of the vocabulary.
    """
    ranks = dist.get_world_size(part.group)
    mine = torch.stack([normalizers, entropy])
    received = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(received, mine, group=part.group)
    dist.all_reduce(logits, group=part.group)
    of_rank, entropies = torch.stack(received).unbind(1)
    total = torch.logsumexp(of_rank, 0)
    logs = of_rank - total  # of the probability that a token is one of the rank's
    return total, (logs.exp() * (entropies - logs)).sum(0), logits


def split_logprobs(
    logits: Tensor, at: Tensor, targets: Tensor, part: VocabularyPart
) -> tuple[Tensor, Tensor]:
    """Compute log-probs of tokens and the entropies of all rows, from this rank's logits of each token.

    Args:
        logits: [N, V / ranks] this rank's logits, in float32.
        at: [M] the row of each token.
        targets: [M] token ids.
        part: This rank's part of the vocabulary.
    """
    highest = logits.detach().max(-1).values
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=part.group)
    logits = logits - highest[:, None]
    normalizers = sum_states(logits.exp().sum(-1), part.group).log()
    local, mine = local_ids(targets, logits.shape[-1], part)
    chosen = torch.where(mine, logits[at, local], 0.0)
    logprobs = sum_states(chosen, part.group) - normalizers[at]
    logs = logits - sum_gradients(normalizers, part.group)[:, None]
    return logprobs, -sum_states((logs.exp() * logs).sum(-1), part.group)


def local_ids(targets: Tensor, size: int, part: VocabularyPart) -> tuple[Tensor, Any]:
    """Return the index of each token in this rank's part, 0 for others, and which are in it."""
    local = targets - part.start
    mine = (local >= 0) & (local < size)
    return local.where(mine, 0), mine


def sum_over(tensor: Tensor, part: VocabularyPart) -> Tensor:
    """Sum a tensor over the ranks that share the vocabulary, in place."""
    dist.all_reduce(tensor, group=part.group)
    return tensor
