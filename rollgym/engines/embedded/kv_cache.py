"""KV cache of the running sequences.

`KVCache` is one tensor with a slot for each running sequence, all of one length, so that attention over all
of them is a single call on a view. Prefixes that outlive their sequence are copied into a `PrefixCache`. Both
are counted in tokens: the engine keeps their sum within ``cache_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["KVCache", "KVShape", "round_up"]


_LAZY = 1 << 20
"""Caches of at least so many bytes get their memory from the system as they are written."""
_ALIGNMENT = 64


def _lazy_zeros(count: int) -> Tensor:
    """Return zeros that use no memory until they are written: `torch.zeros` writes all of them."""
    raw = np.zeros(count + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + count])


def round_up(n: int, step: int) -> int:
    """Round ``n`` up to a multiple of ``step``."""
    return -(-n // step) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Shape of the keys and values of one token."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize


class KVCache:
    """Keys and values of the running sequences: ``data[layer, key or value, slot, head, position]``."""

    def __init__(self, shape: KVShape, slots: int = 0, length: int = 0) -> None:
        self.shape = shape
        self.data = self._make(slots, length)

    def _make(self, slots: int, length: int) -> Tensor:
        # Zeros, not uninitialized memory: attention reads past a sequence's end and masks the result.
        s = self.shape
        size = s.layers, 2, slots, s.heads, length, s.dim
        if s.device.type == "cpu" and (count := slots * length * s.token_bytes) >= _LAZY:
            return _lazy_zeros(count).view(s.dtype).view(size)
        return torch.zeros(size, dtype=s.dtype, device=s.device)

    @property
    def slots(self) -> int:
        """Number of sequences."""
        return self.data.shape[2]

    @property
    def length(self) -> int:
        """Number of tokens of each slot."""
        return self.data.shape[4]

    @property
    def tokens(self) -> int:
        """Allocated tokens."""
        return self.slots * self.length

    def views(
        self, slot: int, count: int, end: int, start: int = 0
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return views of the keys and values of each layer, ``[slot, head, position]``."""
        keys, values = self.data[:, :, slot : slot + count, :, start:end].unbind(1)
        return keys.unbind(0), values.unbind(0)

    def by_position(self) -> Sequence[Tensor]:
        """Return views of the layers to write tokens to, ``[slot, position, key or value, head]``."""
        return self.data.permute(0, 2, 4, 1, 3, 5).unbind(0)

    def resize(self, slots: int, length: int, used: int | None = None) -> None:
        """Change the size; content within the new size is kept, of the first ``used`` slots or of all."""
        old, self.data = self.data, self._make(slots, length)
        n, m = min(slots, old.shape[2] if used is None else used), min(length, old.shape[4])
        self.data[:, :, :n, :, :m] = old[:, :, :n, :, :m]

    def load(self, slot: int, start: int, kv: Tensor, count: int) -> None:
        """Copy the first ``count`` tokens of a block to a position of a slot."""
        self.data[:, :, slot, :, start : start + count] = kv[:, :, :, :count]

    def read(self, slot: int, start: int, end: int) -> Tensor:
        """Return a view of a slot's tokens."""
        return self.data[:, :, slot, :, start:end]

    def move(self, source: int, target: int, count: int) -> None:
        """Copy a slot's first ``count`` tokens to another."""
        self.data[:, :, target, :, :count] = self.data[:, :, source, :, :count]

    def wipe(self, slot: int) -> None:
        """Zero a slot that may contain NaN."""
        self.data[:, :, slot] = 0
