"""How much each token counts in the loss, worked out once over the whole batch.

A loss is the sum of weight times per-token loss. No micro-batch, accumulation step or rank divides by a count
of its own, so every way to cut a batch gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rollgym.errors import UnknownName, UsageError

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
    """The weight of each action token: one array for each episode, its rows end to end.

    ``lengths`` has the number of action tokens in each row of each episode; the cut into rows changes no
    weight. An episode that is left out, or has no tokens, is in no denominator.

    Args:
        lengths: for each episode, the action tokens of each of its rows.
        mode: ``token-mean`` gives every token the same weight, ``sequence-mean`` every episode;
            ``constant`` divides by episodes times ``constant`` (Dr. GRPO, arXiv 2503.20783).
        constant: the divisor of mode ``constant``, for example the most tokens an episode can have.
        keep: for each episode, whether it counts, or a flag for each of its tokens.
    """
    _check(mode, constant)
    masks = _masks(lengths, keep)
    counts = [int(mask.sum()) for mask in masks]
    episodes = sum(count > 0 for count in counts)
    if mode == "token-mean":
        divisors = [float(sum(counts))] * len(counts)
    elif mode == "sequence-mean":
        divisors = [float(episodes * count) for count in counts]
    else:
        divisors = [episodes * float(constant or 0)] * len(counts)
    return [
        mask / divisor if count else np.zeros(len(mask))
        for mask, count, divisor in zip(masks, counts, divisors, strict=True)
    ]


def split_rows(weights: FloatArray, lengths: Sequence[int]) -> list[FloatArray]:
    """Cut the weights of one episode into its rows."""
    if sum(lengths) != len(weights):
        raise UsageError(f"rows of {list(lengths)} tokens do not make up {len(weights)} weights")
    return np.split(weights, list(accumulate(lengths))[:-1]) if lengths else []


def _check(mode: str, constant: float | None) -> None:
    if mode not in MODES:
        raise UnknownName("weighting", mode, MODES, f"Choose one of {', '.join(MODES)}.")
    if mode == "constant" and not (constant is not None and 0 < constant < np.inf):
        raise UsageError(f"weighting 'constant' needs a positive, finite constant, not {constant}")
    if mode != "constant" and constant is not None:
        raise UsageError(f"weighting {mode!r} does not read constant; leave it out, or choose 'constant'")


def _masks(
    lengths: Sequence[Sequence[int]], keep: Sequence[bool | Sequence[bool] | BoolArray] | None
) -> list[BoolArray]:
    if any(length < 0 for rows in lengths for length in rows):
        raise UsageError("a row cannot have fewer than 0 action tokens")
    if keep is None:
        keep = [True] * len(lengths)
    if len(keep) != len(lengths):
        raise UsageError(f"keep has {len(keep)} entries for {len(lengths)} episodes")
    masks = []
    for index, (rows, kept) in enumerate(zip(lengths, keep, strict=True)):
        total, flags = sum(rows), np.asarray(kept, dtype=np.bool_)
        if flags.ndim and flags.shape != (total,):
            raise UsageError(f"keep has {flags.size} flags for the {total} tokens of episode {index}")
        masks.append(np.broadcast_to(flags, (total,)))
    return masks
