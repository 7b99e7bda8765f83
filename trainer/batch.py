"""A training batch: rows of different lengths, and flat arrays over all their action tokens.

Nothing is padded to be divisible, repeated or dropped. How rows are cut into micro-batches is a matter of
memory and speed alone: every token carries its weight in the whole batch, so any partition has the same
gradient.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollgym.errors import UsageError
from rollgym.trainer.rows import FloatArray, IntArray, Row, TokenEpisode


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Episodes to learn from. Arrays are over action tokens, episode by episode, row by row."""

    episodes: tuple[TokenEpisode, ...]
    arrays: dict[str, FloatArray]
    """``behaviour``, ``advantages``; where there are any, ``returns``, ``values``, ``reference``, ``old``,
    and ``staleness``: weight updates between the policy that sampled a token and this one."""
    rows: tuple[Row, ...] = field(init=False)
    owner: IntArray = field(init=False)
    """[rows] which episode a row is of."""
    starts: IntArray = field(init=False)
    """[rows + 1] where each row's action tokens begin in the arrays."""

    def __post_init__(self) -> None:
        rows = [(row, number) for number, one in enumerate(self.episodes) for row in one.rows]
        counts = [len(row.places) for row, _ in rows]
        object.__setattr__(self, "rows", tuple(row for row, _ in rows))
        object.__setattr__(self, "owner", np.array([number for _, number in rows], dtype=np.int64))
        object.__setattr__(self, "starts", np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
        for name, values in self.arrays.items():
            if values.shape != (int(self.starts[-1]),):
                raise UsageError(f"{name} has {values.shape} entries for {self.starts[-1]} action tokens")

    @property
    def tokens(self) -> int:
        """How many action tokens there are."""
        return int(self.starts[-1])

    @property
    def lengths(self) -> list[list[int]]:
        """Action tokens of each row of each episode."""
        return [[len(row.places) for row in one.rows] for one in self.episodes]

    def having(self, **arrays: FloatArray) -> Batch:
        """The same batch with more arrays."""
        return Batch(self.episodes, {**self.arrays, **arrays})

    def flat(self, rows: Sequence[int]) -> IntArray:
        """Where in the arrays the action tokens of these rows are."""
        spans = [np.arange(self.starts[row], self.starts[row + 1]) for row in rows]
        return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)

    def by_episode(self, values: FloatArray) -> list[FloatArray]:
        """One of the arrays, cut into the episodes'."""
        return np.split(values, np.cumsum([one.count for one in self.episodes])[:-1])

    def rows_of(self, episodes: Sequence[int]) -> list[int]:
        """The rows of these episodes."""
        return np.flatnonzero(np.isin(self.owner, episodes)).tolist()


def make_batch(episodes: Sequence[TokenEpisode], **arrays: Sequence[FloatArray]) -> Batch:
    """A batch from episodes and one array for each of them, by name."""
    joined = {"behaviour": _join([one.behaviour for one in episodes])}
    return Batch(tuple(episodes), joined | {name: _join(parts) for name, parts in arrays.items()})


def _join(parts: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts] or [np.zeros(0)])


def micro_batches(lengths: Sequence[int], budget: int, *, padded: bool) -> list[list[int]]:
    """Rows together, as many as a budget of tokens allows; a longer row is alone.

    With ``padded`` a row counts as long as the longest beside it, and neighbours in length go together; else
    rows are packed end to end, the longest first into the fullest that has room.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if padded:
        return _in_order(order, lengths, budget)
    parts: list[list[int]] = []
    room: list[int] = []
    for row in order:
        fits = [part for part in range(len(parts)) if room[part] >= lengths[row]]
        if not fits:
            parts.append([])
            room.append(budget)
            fits = [len(parts) - 1]
        best = min(fits, key=lambda part: (room[part], part))
        parts[best].append(row)
        room[best] -= lengths[row]
    return parts


def _in_order(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    parts: list[list[int]] = []
    longest = 0
    for row in order:
        if not parts or longest * (len(parts[-1]) + 1) > budget:
            parts.append([])
            longest = lengths[row]
        parts[-1].append(row)
    return parts


def balanced(costs: Sequence[float], shares: int) -> list[list[int]]:
    """Indices in as many parts of about the same cost, dearest first to whoever has least."""
    heap = [(0.0, share) for share in range(shares)]
    parts: list[list[int]] = [[] for _ in range(shares)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, share = heapq.heappop(heap)
        parts[share].append(index)
        heapq.heappush(heap, (total + costs[index], share))
    return [sorted(part) for part in parts]


def mini_batches(count: int, parts: int, rng: np.random.Generator) -> list[list[int]]:
    """Episodes dealt out at random into parts whose sizes differ by one at most."""
    if not parts >= 1:
        raise UsageError(f"A batch is split into at least 1 part, not {parts}.")
    order = rng.permutation(count)
    return [sorted(part.tolist()) for part in np.array_split(order, min(parts, max(count, 1)))]
