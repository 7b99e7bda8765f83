"""Loss aggregation: the weight of each token, computed once over the whole batch.

A loss is the sum of weight times per-token loss. No micro-batch, accumulation step or rank divides by its own
count, so every partition of a batch has the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rollgym.core.errors import UnknownName, UsageError

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Mode = Literal["token-mean", "sequence-mean", "constant"]
MODES: tuple[Mode, ...] = get_args(Mode)


def token_weights(
    lengths: Sequence[Sequence[int]],
    mode: Mode,
    *,
    constant: float | None = None,
    keep: Sequence[bool | Sequence[bool] | BoolArray] | None = None,
) -> list[FloatArray]:
    """Compute the weight of each action token: one array per episode, its sequences end to end.

    The split of an episode into sequences changes no weight. An episode that is left out or has no tokens
    is in no denominator.

    Args:
        lengths: For each episode, the number of action tokens of each of its sequences.
        mode: ``token-mean`` gives every token the same weight, ``sequence-mean`` every episode;
            ``constant`` divides by the number of episodes times ``constant`` (Dr. GRPO, arXiv 2503.20783).
        constant: Divisor of mode ``constant``, for example the maximum number of tokens of an episode.
        keep: For each episode, whether it counts, or a flag for each of its tokens. Default: all count.

    Example:
        >>> [weights.tolist() for weights in token_weights([[2], [1, 1]], "token-mean")]
        [[0.25, 0.25], [0.25, 0.25]]
    """
    check_aggregation(mode, constant)
    masks = _masks(lengths, keep)
    counts = [int(mask.sum()) for mask in masks]
    divisors = token_divisors(counts, mode, constant)
    return [
        mask / divisor if count else np.zeros(len(mask))
        for mask, count, divisor in zip(masks, counts, divisors, strict=True)
    ]


def token_divisors(counts: Sequence[int], mode: Mode, constant: float | None = None) -> list[float]:
    """Divide 1 by these for the weight of a token of each episode, given how many of its tokens count."""
    episodes = sum(count > 0 for count in counts)
    if mode == "token-mean":
        return [float(sum(counts))] * len(counts)
    if mode == "sequence-mean":
        return [float(episodes * count) for count in counts]
    return [episodes * float(constant or 0)] * len(counts)


def check_aggregation(mode: str, constant: float | None) -> None:
    """Raise `UsageError` unless the mode exists and the constant is given exactly where it is read."""
    if mode not in MODES:
        raise UnknownName("loss aggregation", mode, MODES, f"Choose one of {', '.join(MODES)}.")
    if mode == "constant" and not (constant is not None and 0 < constant < np.inf):
        raise UsageError(
            f"aggregation=constant needs a positive, finite aggregation_constant, got {constant}."
        )
    if mode != "constant" and constant is not None:
        raise UsageError(
            f"aggregation={mode} does not read aggregation_constant: remove it, or set aggregation=constant."
        )


def _masks(
    lengths: Sequence[Sequence[int]], keep: Sequence[bool | Sequence[bool] | BoolArray] | None
) -> list[BoolArray]:
    if any(length < 0 for sequences in lengths for length in sequences):
        raise UsageError("The number of action tokens of a sequence must be 0 or more.")
    if keep is None:
        keep = [True] * len(lengths)
    if len(keep) != len(lengths):
        raise UsageError(f"keep has {len(keep)} entries for {len(lengths)} episodes.")
    masks = []
    for index, (sequences, kept) in enumerate(zip(lengths, keep, strict=True)):
        num_tokens, flags = sum(sequences), np.asarray(kept, dtype=np.bool_)
        if flags.ndim and flags.shape != (num_tokens,):
            raise UsageError(f"keep has {flags.size} flags for the {num_tokens} tokens of episode {index}.")
        masks.append(np.broadcast_to(flags, (num_tokens,)))
    return masks
