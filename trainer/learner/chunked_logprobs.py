"""Log-probs and entropy from hidden states, without the logits of all tokens in memory at once.

A vocabulary of 50,000 tokens makes 200 kB of logits per token, and autograd would keep several tensors of
that size for every action token of a micro-batch. Here logits exist for one chunk of tokens at a time, and
the backward pass computes them again from the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollgym.trainer.data.sequences import IntArray
from rollgym.trainer.learner.vocabulary_parallel import VocabularyPart, combine, local_ids, sum_over

MAX_LOGITS = 2**24
"""Logits in memory at once: 64 MB in float32. Fewer are computed in one piece."""


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: IntArray,
    targets: Tensor,
    temperature: float,
    cast: Tensor | None = None,
    vocabulary: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs of tokens, and the entropy of the distributions that they come from.

    Args:
        hidden: [N, width] states.
        weight: [V, width] of the output layer.
        bias: [V] of the output layer.
        rows: [M] the state that predicts each token; on the host.
        targets: [M] token ids.
        temperature: The logits are divided by it.
        cast: The weight in the dtype of autocast, to compute with.
        vocabulary: The tokens that the weight is of, where other ranks have the others.

    Returns:
        [M] log-probs and [N] entropies, in float32.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden = hidden.to(dtype)
        weight = weight.to(dtype) if cast is None else weight
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        apply: Any = _ChunkedLogprobs.apply
        logprobs, entropy = apply(hidden, weight, bias, rows, targets, temperature, cast, vocabulary)
    return logprobs, entropy


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: IntArray,
        targets: Tensor,
        temperature: float,
        cast: Tensor | None,
        vocabulary: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.weight_dtype, ctx.rows = weight.dtype, rows
        at = torch.from_numpy(rows).to(hidden.device)
        weight = weight if cast is None else cast
        mine: Tensor | None = None
        if vocabulary is not None:
            targets, mine = local_ids(targets, len(weight), vocabulary)
        logprobs = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
        normalizers = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(normalizers)
        for chunk, picked in _chunks(hidden, weight, rows):
            logits = _logits(hidden[chunk], weight, bias, temperature)
            normalizers[chunk] = torch.logsumexp(logits, -1)
            logprobs[picked] = logits[at[picked] - chunk.start, targets[picked]]
            logs = logits.sub_(normalizers[chunk, None])
            entropy[chunk] = -(logs.exp().mul_(logs)).sum(-1)
        if vocabulary is not None and mine is not None:
            chosen = logprobs.where(mine, 0.0)
            normalizers, entropy, logprobs = combine(normalizers, entropy, chosen, vocabulary)
        ctx.save_for_backward(hidden, weight, bias, at, targets, normalizers, entropy, mine)
        ctx.temperature, ctx.vocabulary = temperature, vocabulary
        return logprobs - normalizers[at], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logprob_grad, entropy_grad = grads
        hidden, weight, bias, of_token, targets, normalizers, entropy, mine = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Sums over chunks are kept in float32, whatever the compute dtype.
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        of_row = torch.zeros_like(normalizers).index_add_(0, of_token, logprob_grad)
        of_target = logprob_grad if mine is None else logprob_grad.where(mine, 0.0)
        for chunk, picked in _chunks(hidden, weight, ctx.rows):
            logits = _logits(hidden[chunk], weight, bias, ctx.temperature)
            logs = logits.sub_(normalizers[chunk, None])
            probs = logs.exp()
            # d entropy / d logit = -p (log p + entropy); d logprob / d logit = [target] - p
            slope = logs.add_(entropy[chunk, None]).mul_(-entropy_grad[chunk, None])
            grad = slope.sub_(of_row[chunk, None]).mul_(probs)
            at = (of_token[picked] - chunk.start, targets[picked])
            grad.index_put_(at, of_target[picked], accumulate=True)
            grad = grad.div_(ctx.temperature).to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad[chunk] = grad @ weight
            if weight_grad is not None:
                if grad.dtype == torch.float32:
                    weight_grad.addmm_(grad.T, hidden[chunk])
                else:
                    weight_grad += grad.T @ hidden[chunk]
            if bias_grad is not None:
                bias_grad += grad.sum(0, dtype=torch.float32)
        if hidden_grad is not None and ctx.vocabulary is not None:
            hidden_grad = sum_over(hidden_grad, ctx.vocabulary)
        weight_grad = None if weight_grad is None else weight_grad.to(ctx.weight_dtype)
        bias_grad = None if bias_grad is None else bias_grad.to(bias.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None, None, None


def _chunks(hidden: Tensor, weight: Tensor, rows: IntArray) -> Iterator[tuple[slice, Tensor]]:
    """Return the states of each chunk, and the indices of the tokens that they predict."""
    # In lower precision, copies in both dtypes exist at once.
    limit = MAX_LOGITS if weight.dtype == torch.float32 else MAX_LOGITS // 2
    size = max(1, limit // len(weight))
    # On the host: the number of tokens of a chunk decides about shapes, for which a device would be waited.
    order = np.argsort(rows, kind="stable")
    bounds = np.searchsorted(rows[order], np.arange(0, len(hidden) + size, size))
    for number, start in enumerate(range(0, len(hidden), size)):
        chunk = slice(start, min(start + size, len(hidden)))
        yield chunk, torch.from_numpy(order[bounds[number] : bounds[number + 1]]).to(hidden.device)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return logits if temperature == 1.0 else logits.div_(temperature)
