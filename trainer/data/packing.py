"""Packing: sequences end to end in one forward pass, where a shared prefix is computed once.

Episodes of a group start with the same prompt, and often with the same first turns. A causal model computes
the same states for them in every sequence, so the packed tokens contain them once; each sequence has a path
through the packed tokens and attends along it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollgym.core.routed_experts import ExpertArray
from rollgym.trainer.data.sequences import IntArray, TokenSequence

MIN_OVERLAP = 16
"""Sequences are kept together for a shared prefix of at least this many tokens."""
MIN_SAVED = 0.1
"""Prefixes are shared if this saves at least this fraction of all tokens; following paths has a cost."""
LONG_PREFIX = 64
"""From this length on, queries of a shared prefix are not computed again for each sequence; for shorter ones
the masks that this needs would cost more."""
SHARED_TOKEN_COST = 0.25
"""Cost of a shared token for a sequence that reuses it, relative to computing it: attention over it is
computed again."""
GATHERED_TOKEN_COST = 0.05
"""The same in a long prefix: its keys and values are gathered again."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """The tokens of several sequences for one forward pass."""

    ids: IntArray
    """[T] The tokens to compute."""
    positions: IntArray
    """[T] Position of each token in its sequence."""
    paths: tuple[IntArray, ...]
    """For each sequence, the indices into ``ids`` of its tokens."""
    order: tuple[int, ...]
    """The sequences in the order in which their tokens were appended to ``ids``."""
    shared: tuple[int, ...]
    """In that order: number of leading tokens of a sequence that an earlier one contributed."""

    @property
    def sizes(self) -> list[int]:
        """Lengths of the sequences, in that order."""
        return [len(self.paths[index]) for index in self.order]

    @property
    def route(self) -> IntArray | None:
        """All paths end to end, in that order; ``None`` if nothing is shared and ``ids`` is in that order."""
        return np.concatenate([self.paths[index] for index in self.order]) if any(self.shared) else None


def pack(inputs: Sequence[IntArray], experts: Sequence[ExpertArray | None] | None = None) -> Packing:
    """Pack sequences end to end; if it saves enough, shared prefixes only once.

    Args:
        inputs: The tokens of each sequence.
        experts: Experts of these tokens: tokens with other experts are not shared.
    """
    order = sorted(range(len(inputs)), key=lambda index: inputs[index].tobytes())
    shared = _overlaps([inputs[index] for index in order])
    if experts is not None:
        for at in range(1, len(order)):
            before, here = experts[order[at - 1]], experts[order[at]]
            shared[at] = _same_experts(before, here, shared[at])
    if sum(shared) < MIN_SAVED * sum(map(len, inputs)):
        order, shared = list(range(len(inputs))), [0] * len(inputs)
    paths: list[IntArray] = [np.zeros(0, dtype=np.int64)] * len(inputs)
    previous, total = paths[0], 0
    for index, common in zip(order, shared, strict=True):
        added = len(inputs[index]) - common
        previous = np.concatenate([previous[:common], np.arange(total, total + added)])
        paths[index] = previous
        total += added
    pairs = list(zip(order, shared, strict=True))
    return Packing(
        ids=np.concatenate([inputs[index][common:] for index, common in pairs]),
        positions=np.concatenate([np.arange(common, len(inputs[index])) for index, common in pairs]),
        paths=tuple(paths),
        order=tuple(order),
        shared=tuple(shared),
    )


@dataclass(frozen=True, slots=True, eq=False)
class RowIndex:
    """What a partition of sequences into micro-batches depends on, without their tokens.

    Made once for a batch; the overlaps of any of its sequences follow from it, because in sorted order two
    sequences share what all between them share.
    """

    lengths: IntArray
    """[sequences] Number of tokens of each that the model reads."""
    order: IntArray
    """[sequences] The sequences, sorted so that those with a common prefix are side by side."""
    overlaps: IntArray
    """[sequences] In that order, the length of the prefix that each shares with the one before."""
    equal: NDArray[np.bool_]
    """[sequences] In that order, whether each has the same forward pass as the one before."""


def row_index(sequences: Sequence[TokenSequence]) -> RowIndex:
    """Compare the tokens of sequences with each other."""
    keys = [sequence.key for sequence in sequences]
    order = sorted(range(len(sequences)), key=lambda index: keys[index])
    equal = [at > 0 and keys[index] == keys[order[at - 1]] for at, index in enumerate(order)]
    return RowIndex(
        lengths=np.array([len(sequence.inputs) for sequence in sequences], dtype=np.int64),
        order=np.array(order, dtype=np.int64),
        overlaps=np.array(_overlaps([sequences[index].inputs for index in order]), dtype=np.int64),
        equal=np.array(equal, dtype=np.bool_),
    )


def bundles(index: RowIndex, room: int, chosen: Sequence[int] | None = None) -> list[tuple[list[int], int]]:
    """Group sequences with shared prefixes, up to ``room`` tokens; returns their numbers and cost in tokens.

    Sequences with the same forward pass are always in one bundle, at the cost of one of them. ``chosen``: the
    sequences to group; default: all.
    """
    wanted = np.ones(len(index.lengths), dtype=np.bool_)
    if chosen is not None:
        wanted[:] = False
        wanted[list(chosen)] = True
    members: list[list[int]] = []
    costs: list[float] = []
    lengths = index.lengths.tolist()
    common, equal = 0, False
    for row, overlap, same, here in zip(
        index.order.tolist(),
        index.overlaps.tolist(),
        index.equal.tolist(),
        wanted[index.order].tolist(),
        strict=True,
    ):
        common, equal = min(common, overlap), equal and same
        if not here:
            continue
        again = SHARED_TOKEN_COST if common < LONG_PREFIX else GATHERED_TOKEN_COST
        cost = 0.0 if equal else lengths[row] - common + again * common
        if not equal and (common < MIN_OVERLAP or costs[-1] + cost > room):
            members.append([])
            costs.append(0.0)
            cost = float(lengths[row])
        members[-1].append(row)
        costs[-1] += cost
        common, equal = lengths[row], True
    return sorted((sorted(bundle), round(cost)) for bundle, cost in zip(members, costs, strict=True))


def whole_episodes(
    episode_of: Sequence[int], lengths: Sequence[int], *, padded: bool
) -> list[tuple[list[int], int]]:
    """Group the sequences of each episode; returns indices and cost in tokens.

    For losses with one ratio per episode, whose micro-batches must contain all sequences of an episode.
    Padded sequences each cost as much as the longest.
    """
    members: dict[int, list[int]] = {}
    for index, episode in enumerate(episode_of):
        members.setdefault(episode, []).append(index)
    result = []
    for own in members.values():
        sizes = [lengths[index] for index in own]
        result.append((own, max(sizes) * len(own) if padded else sum(sizes)))
    return result


def _same_experts(before: ExpertArray | None, here: ExpertArray | None, count: int) -> int:
    """Return how many of the first ``count`` tokens have the same experts in both."""
    if before is None or here is None:
        return count if before is here else 0
    differ = (before[:count] != here[:count]).any((1, 2))
    return int(differ.argmax()) if differ.any() else count


def _overlaps(inputs: Sequence[IntArray]) -> list[int]:
    """For each sequence, the length of the prefix it shares with the sequence before it."""
    overlaps = [0] * len(inputs)
    for at in range(1, len(inputs)):
        previous, current = inputs[at - 1], inputs[at]
        length = min(len(previous), len(current))
        differ = previous[:length] != current[:length]
        first = int(differ.argmax()) if length else 0
        overlaps[at] = first if length and differ[first] else length
    return overlaps
