"""Sampling: pure functions of logits, parameters and (seed, position).

A result does not depend on other rows of the batch: every operation works along a row, and the uniform number
of a draw is a hash of the request's seed and the token's absolute position. So a reply is batch invariant,
and turns of one conversation that share a seed still draw different numbers.

Filters apply in this order: temperature, top-k, top-p, min-p. Ties go to the lower id. The reported log-prob
is that of the distribution sampled from, after temperature and filters. Temperature 0 is a point mass on the
most likely token: log-prob 0.0, as with top-k 1.

A batch of rows of a large vocabulary exceeds the CPU's caches, and summing it up in double precision takes
longer than the model's output layer. So such rows are sampled a few at a time, and in two steps: a block of
the vocabulary, then a token in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollgym.engines.base import Sampling

__all__ = ["draw", "keep_mask", "stream", "uniforms"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_COLDEST = 1e-37
"""Smaller temperatures underflow in single precision."""
_LARGE = 8192
"""Vocabularies of at least so many tokens are sampled in two steps."""
_BLOCK = 256
"""Tokens of a block, of a large vocabulary."""
_AT_ONCE = 1 << 19
"""Numbers of a large vocabulary to sample from at once: 2 MB in single precision."""
_BELOW_ONE = 1 - 2.0**-52


def _mix(x: Any) -> Any:
    """The 64-bit finalizer of SplitMix64 (Steele, Lea, Flood 2014), for an integer or an array."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def stream(seed: int) -> int:
    """Hash a seed of any size into a 64-bit state."""
    state: int = _mix(seed & _MASK)
    while seed := seed >> 64:
        state = _mix(state ^ (seed & _MASK))
    return state


def uniforms(states: Sequence[int], positions: Sequence[int]) -> list[float]:
    """Return numbers in [0, 1), each a function of a seed's `stream` and a position."""
    if len(states) < 8:  # too few for arrays to pay
        return [(_mix(_mix(s ^ p)) >> 12) * 2.0**-52 for s, p in zip(states, positions, strict=True)]
    mixed = np.array(states, dtype=np.uint64) ^ np.array(positions, dtype=np.uint64)
    found: list[float] = ((_mix(_mix(mixed)) >> 12) * 2.0**-52).tolist()
    return found


def draw(
    logits: Tensor, settings: Sequence[Sampling], numbers: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Sample one token per row by inverting its CDF at a number in [0, 1).

    Returns:
        Token ids, and their log-probs: NaN for rows whose logits are NaN.
    """
    rows = max(1, _AT_ONCE // logits.shape[-1])
    if logits.shape[-1] < _LARGE or len(logits) <= rows or logits.device.type != "cpu":
        return _draw(logits, settings, numbers)
    tokens: list[int] = []
    logprobs: list[float] = []
    for first in range(0, len(logits), rows):
        part = slice(first, first + rows)
        found = _draw(logits[part], settings[part], numbers[part])
        tokens += found[0]
        logprobs += found[1]
    return tokens, logprobs


def _most_likely(scores: Tensor) -> tuple[list[int], list[float]]:
    """Return the most likely tokens and the log-probs of point masses."""
    tokens = scores.argmax(-1)
    best = scores.gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), (best - best).tolist()  # NaN where it is not finite


def _draw(
    logits: Tensor, settings: Sequence[Sampling], numbers: Sequence[float]
) -> tuple[list[int], list[float]]:
    if all(s.temperature == 0 for s in settings):
        return _most_likely(logits.float())
    scores = _heated(logits, settings)
    filtered = [i for i, s in enumerate(settings) if s.temperature and _filters(s)]
    if filtered:
        rows = torch.tensor(filtered, device=logits.device)
        kept = keep_mask(scores[rows], [settings[i] for i in filtered])
        scores = scores.index_copy(0, rows, scores[rows].masked_fill(~kept, -torch.inf))
    probs = torch.softmax(scores, -1)
    tokens = _invert(probs, torch.tensor(numbers, dtype=torch.float64, device=logits.device))
    greedy = [s.temperature == 0 for s in settings]
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logits.device), scores.argmax(-1), tokens)
    chosen = probs.gather(-1, tokens[:, None])[:, 0].tolist()
    # `math.log` and not `torch.log`: the latter rounds differently at the end of a tensor.
    logs = [p if p != p else 0.0 if zero else math.log(p) for p, zero in zip(chosen, greedy, strict=True)]
    return tokens.tolist(), logs


def _heated(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Divide scores by temperature; temperature 0 counts as 1 here."""
    scores = logits.float()
    heat = [max(s.temperature, _COLDEST) if s.temperature else 1.0 for s in settings]
    if all(h == 1.0 for h in heat):
        return scores
    # Relative to the maximum, so that dividing by a tiny temperature cannot overflow.
    return (scores - scores.amax(-1, keepdim=True)) / _column(heat, scores)


def keep_mask(scores: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Return a mask of the tokens that pass the filters: at least one per row."""
    ordered, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    top_k = _column([s.top_k or scores.shape[-1] for s in settings], scores)
    kept = rank < top_k
    top_p = torch.tensor([s.top_p for s in settings], dtype=torch.float64, device=scores.device)[:, None]
    probs = torch.softmax(ordered.masked_fill(~kept, -torch.inf), -1)
    # A token stays while those before it do not yet add up to top-p; 1.0 must not lose any to rounding.
    before = probs.cumsum(-1, dtype=torch.float64) - probs
    kept &= (before < top_p) | (top_p == 1.0)
    min_p = _column([s.min_p for s in settings], scores)
    kept &= probs >= min_p * probs[:, :1]
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter(-1, ids, kept)


def _filters(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _invert(probs: Tensor, numbers: Tensor) -> Tensor:
    """Return the token at which each row's cumulative distribution passes its uniform number."""
    if probs.shape[-1] < _LARGE:
        return _invert_row(probs, numbers)
    whole = probs.shape[-1] // _BLOCK * _BLOCK
    sums = probs[:, :whole].view(len(probs), -1, _BLOCK).sum(-1)
    if whole < probs.shape[-1]:
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], 1)
    rising = sums.cumsum(-1, dtype=torch.float64)
    target = numbers[:, None] * rising[:, -1:]
    block = torch.searchsorted(rising, target, right=True).clamp_(max=sums.shape[1] - 1)  # for NaN rows
    size = sums.gather(1, block).double()
    rest = ((target - rising.gather(1, block) + size) / size).clamp_(0.0, _BELOW_ONE)[:, 0]
    ids = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(1, ids.clamp(max=probs.shape[-1] - 1))
    inside = inside.masked_fill_(ids >= probs.shape[-1], 0.0)
    found = block[:, 0] * _BLOCK + _invert_row(inside, rest)
    return found.clamp_(max=probs.shape[-1] - 1)  # for NaN rows


def _invert_row(probs: Tensor, numbers: Tensor) -> Tensor:
    rising = probs.cumsum(-1, dtype=torch.float64)
    # Below the last value even after rounding (a uniform has 52 bits), and above those of tokens with zero
    # probability: the result always has positive probability.
    found = torch.searchsorted(rising, numbers[:, None] * rising[:, -1:], right=True)[:, 0]
    return found.clamp_(max=probs.shape[-1] - 1)  # for NaN rows
