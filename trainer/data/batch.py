"""Training batches: sequences of different lengths, and flat arrays over all their action tokens.

No sequence is padded for divisibility, repeated or dropped. Every token has its weight in the whole batch, so
every partition into micro-batches has the same gradient; the partition affects memory and speed only.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollgym.core.errors import UsageError
from rollgym.trainer.data.packing import RowIndex, row_index
from rollgym.trainer.data.sequences import FloatArray, IntArray, TokenEpisode, TokenSequence


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Episodes to train on. Arrays are over action tokens, episode by episode, sequence by sequence."""

    episodes: tuple[TokenEpisode, ...]
    arrays: dict[str, FloatArray]
    """``behavior`` and ``advantages``; optionally ``returns``, ``values``, ``reference``, ``old``,
    ``staleness``: weight updates between the policy that sampled a token and the current one, and
    ``trained``: 0 for tokens without a gradient, else 1."""
    sequences: tuple[TokenSequence, ...] = field(init=False)
    episode_of: IntArray = field(init=False)
    """[sequences] Index of the episode of each sequence."""
    starts: IntArray = field(init=False)
    """[sequences + 1] Index into the arrays of the first action token of each sequence."""
    _index: list[RowIndex] = field(init=False, repr=False)
    """`index` once it was needed; shared with the batches of `with_arrays`."""

    def __post_init__(self) -> None:
        pairs = [(s, number) for number, episode in enumerate(self.episodes) for s in episode.sequences]
        counts = [len(sequence.action_positions) for sequence, _ in pairs]
        object.__setattr__(self, "sequences", tuple(sequence for sequence, _ in pairs))
        object.__setattr__(self, "episode_of", np.array([number for _, number in pairs], dtype=np.int64))
        object.__setattr__(self, "starts", np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
        object.__setattr__(self, "_index", [])
        for name, values in self.arrays.items():
            if values.shape != (self.num_tokens,):
                raise UsageError(
                    f"The array {name} has shape {values.shape}, expected ({self.num_tokens},): one number "
                    "for each action token."
                )

    @property
    def num_tokens(self) -> int:
        """Number of action tokens."""
        return int(self.starts[-1])

    @property
    def index(self) -> RowIndex:
        """What a partition into micro-batches depends on."""
        if not self._index:
            self._index.append(row_index(self.sequences))
        return self._index[0]

    @property
    def final_lengths(self) -> list[int]:
        """Number of tokens after which each episode's final state is valued; 0 if it is not."""
        return [0 if episode.final_ids is None else len(episode.final_ids) for episode in self.episodes]

    @property
    def has_experts(self) -> bool:
        """Whether an engine recorded the experts of any token."""
        return any(sequence.experts is not None for sequence in self.sequences)

    @property
    def rows_with_advantages(self) -> NDArray[np.bool_]:
        """[sequences] Whether any token that is trained on has an advantage other than 0."""
        advantages = self.arrays["advantages"]
        if "trained" in self.arrays:
            advantages = advantages * self.arrays["trained"]
        return _any_by_row(advantages != 0, self.starts)

    @property
    def trained_tokens(self) -> IntArray:
        """[sequences] Number of tokens that are trained on."""
        counts = np.diff(self.starts)
        return _sum_by_row(self.arrays["trained"] != 0, self.starts) if "trained" in self.arrays else counts

    def fetch(self, sequences: Sequence[int]) -> None:
        """Make the tokens and arrays of these sequences available; here they all are."""

    @property
    def lengths(self) -> list[list[int]]:
        """Number of action tokens of each sequence of each episode."""
        return [[len(sequence.action_positions) for sequence in e.sequences] for e in self.episodes]

    def with_arrays(self, **arrays: FloatArray) -> Batch:
        """Return the batch with additional arrays."""
        batch = Batch(self.episodes, {**self.arrays, **arrays})
        object.__setattr__(batch, "_index", self._index)
        return batch

    def token_indices(self, sequences: Sequence[int]) -> IntArray:
        """Indices into the arrays of the action tokens of these sequences."""
        spans = [np.arange(self.starts[index], self.starts[index + 1]) for index in sequences]
        return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)

    def by_episode(self, values: FloatArray) -> list[FloatArray]:
        """Split an array over action tokens into one array per episode."""
        return np.split(values, np.cumsum([episode.num_tokens for episode in self.episodes])[:-1])

    def sequences_of(self, episodes: Sequence[int]) -> list[int]:
        """Indices of the sequences of these episodes."""
        return np.flatnonzero(np.isin(self.episode_of, episodes)).tolist()


def _sum_by_row(flags: NDArray[np.bool_], starts: IntArray) -> IntArray:
    totals = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    counts: IntArray = totals[starts[1:]] - totals[starts[:-1]]
    return counts


def _any_by_row(flags: NDArray[np.bool_], starts: IntArray) -> NDArray[np.bool_]:
    return _sum_by_row(flags, starts) > 0


def make_batch(episodes: Sequence[TokenEpisode], **arrays: Sequence[FloatArray]) -> Batch:
    """Make a batch from episodes, and arrays given as one part per episode."""
    joined = {"behavior": _join([episode.behavior for episode in episodes])}
    return Batch(tuple(episodes), joined | {name: _join(parts) for name, parts in arrays.items()})


def _join(parts: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts] or [np.zeros(0)])


def mini_batches(count: int, parts: int, rng: np.random.Generator) -> list[list[int]]:
    """Split episode indices at random into parts whose sizes differ by at most one."""
    if not parts >= 1:
        raise UsageError(f"mini_batches must be at least 1, not {parts}.")
    order = rng.permutation(count)
    return [sorted(part.tolist()) for part in np.array_split(order, min(parts, max(count, 1)))]


def micro_batches(lengths: Sequence[int], budget: int, *, padded: bool) -> list[list[int]]:
    """Split sequence indices into parts of at most ``budget`` tokens; a longer sequence is alone.

    With ``padded`` a sequence counts as long as the longest in its part, and sequences of similar length go
    together; else sequences are packed end to end, best fit by decreasing length.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if padded:
        return _in_order(order, lengths, budget)
    parts: list[list[int]] = []
    rooms: list[int] = []  # sorted; of the parts that have room for some sequence
    with_room: dict[int, list[int]] = {}  # heaps of parts, which are many more than different rooms
    least = min(lengths, default=0)
    for index in order:
        at = bisect.bisect_left(rooms, lengths[index])
        if at < len(rooms):
            room = rooms[at]
            best = heapq.heappop(with_room[room])
            if not with_room[room]:
                del rooms[at], with_room[room]
        else:
            room, best = budget, len(parts)
            parts.append([])
        parts[best].append(index)
        room -= lengths[index]
        if room >= least:
            if room not in with_room:
                with_room[room] = []
                bisect.insort(rooms, room)
            heapq.heappush(with_room[room], best)
    return parts


def _in_order(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    parts: list[list[int]] = []
    longest = 0
    for index in order:
        if not parts or longest * (len(parts[-1]) + 1) > budget:
            parts.append([])
            longest = lengths[index]
        parts[-1].append(index)
    return parts


def balanced(costs: Sequence[float], shares: int) -> list[list[int]]:
    """Split indices into ``shares`` parts of similar cost: the most expensive first, to the cheapest part."""
    heap = [(0.0, share) for share in range(shares)]
    parts: list[list[int]] = [[] for _ in range(shares)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, share = heapq.heappop(heap)
        parts[share].append(index)
        heapq.heappush(heap, (total + costs[index], share))
    return [sorted(part) for part in parts]
