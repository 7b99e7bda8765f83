"""Keys and values: of what is being generated (`Arena`), and of conversations that wait (`Sessions`).

The arena is one block of memory with a slot for each running reply, all of one length, so that attention
over all of them is a single call on a view. A conversation between two turns is kept as a tight copy.
Both count in tokens: the engine keeps their sum within its bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Arena", "Kept", "KVShape", "Sessions", "common_prefix", "round_up"]


def round_up(n: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``n``."""
    return -(-n // step) * step


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences share from the start."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # compares whole slices, in C, and halves
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What one token's keys and values look like."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Of one token."""
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize


class Arena:
    """Keys and values of the running replies: ``data[layer, key or value, slot, head, position]``."""

    def __init__(self, shape: KVShape, slots: int = 0, length: int = 0) -> None:
        self.shape = shape
        self.data = self._make(slots, length)

    def _make(self, slots: int, length: int) -> Tensor:
        # Zeros, not garbage: attention reads past a sequence's end and masks what it found there.
        s = self.shape
        return torch.zeros(s.layers, 2, slots, s.heads, length, s.dim, dtype=s.dtype, device=s.device)

    @property
    def slots(self) -> int:
        """How many sequences it holds."""
        return self.data.shape[2]

    @property
    def length(self) -> int:
        """How many tokens of each."""
        return self.data.shape[4]

    @property
    def tokens(self) -> int:
        """What it counts for."""
        return self.slots * self.length

    def views(self, slot: int, count: int, length: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Keys and values of each layer, ``[slot, head, position]``."""
        keys, values = self.data[:, :, slot : slot + count, :, :length].unbind(1)
        return keys.unbind(0), values.unbind(0)

    def by_place(self) -> Sequence[Tensor]:
        """Views of its layers, ``[slot, position, key or value, head]``, to write tokens to."""
        return self.data.permute(0, 2, 4, 1, 3, 5).unbind(0)

    def resize(self, slots: int, length: int) -> None:
        """Change the size; what lies within the new size stays."""
        old, self.data = self.data, self._make(slots, length)
        n, m = min(slots, old.shape[2]), min(length, old.shape[4])
        self.data[:, :, :n, :, :m] = old[:, :, :n, :, :m]

    def load(self, slot: int, kv: Tensor, count: int) -> None:
        """Put the first ``count`` tokens of a kept conversation into a slot."""
        self.data[:, :, slot, :, :count] = kv[:, :, :, :count]

    def save(self, slot: int, count: int) -> Tensor:
        """A copy of a slot's first ``count`` tokens."""
        return self.data[:, :, slot, :, :count].clone()

    def move(self, source: int, target: int, count: int) -> None:
        """Copy a slot's first ``count`` tokens to another."""
        self.data[:, :, target, :, :count] = self.data[:, :, source, :, :count]

    def wipe(self, slot: int) -> None:
        """Zero a slot in which something may not be a number."""
        self.data[:, :, slot] = 0


@dataclass(frozen=True, slots=True)
class Kept:
    """A conversation between two turns: the ids whose keys and values are kept."""

    ids: list[int]
    kv: Tensor


class Sessions:
    """Conversations that wait for their next turn, the longest idle first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, session: str) -> bool:
        return session in self._kept

    def put(self, session: str, kept: Kept) -> None:
        """Keep this, instead of what was kept for the session before."""
        self.pop(session)
        self._kept[session] = kept
        self.tokens += len(kept.ids)

    def pop(self, session: str) -> Kept | None:
        """Take out what is kept for a session."""
        kept = self._kept.pop(session, None)
        if kept is not None:
            self.tokens -= len(kept.ids)
        return kept

    def evict(self) -> bool:
        """Drop the session that has been idle longest; False where there is none."""
        if not self._kept:
            return False
        self.pop(next(iter(self._kept)))
        return True

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()
        self.tokens = 0
