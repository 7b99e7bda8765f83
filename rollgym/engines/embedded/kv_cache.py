"""KV cache of the running sequences.

`KVCache` is one tensor with a slot for each running sequence, all of one length, so that attention over all
of them is a single call on a view. Prefixes that outlive their sequence are copied into a `PrefixCache`. Both
are counted in tokens: the engine keeps their sum within ``cache_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollgym.core.routed_experts import RoutedExperts
from rollgym.engines.embedded.routing import RoutingShape

__all__ = ["KVBlock", "KVCache", "KVShape", "round_up"]


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
    routing: RoutingShape | None = None
    """Shape of the experts that are kept beside the keys and values, if they are."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.kv_bytes + (0 if self.routing is None else self.routing.token_bytes)


@dataclass(frozen=True, slots=True)
class KVBlock:
    """Keys and values of consecutive tokens, ``kv[layer, key or value, head, token]``, with their experts."""

    kv: Tensor
    experts: Tensor | None = None
    """``[token, layer, choice]`` where they are recorded."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.kv.shape[3]

    def part(self, start: int, end: int | None = None) -> KVBlock:
        """Return a view of the tokens from ``start`` up to ``end``."""
        experts = None if self.experts is None else self.experts[start:end]
        return KVBlock(self.kv[:, :, :, start:end], experts)

    def routed_experts(self) -> RoutedExperts | None:
        """Return the experts as plain values."""
        if self.experts is None:
            return None
        stored: Any = self.experts.cpu().numpy()
        return RoutedExperts.from_array(stored.view(np.uint8 if stored.itemsize == 1 else np.uint16))

    def clone(self) -> KVBlock:
        """Return a copy."""
        return KVBlock(self.kv.clone(), None if self.experts is None else self.experts.clone())

    def joined(self, other: KVBlock) -> KVBlock:
        """Return a new block of these tokens and those of another."""
        experts = None
        if self.experts is not None and other.experts is not None:
            experts = torch.cat([self.experts, other.experts])
        return KVBlock(torch.cat([self.kv, other.kv], 3), experts)


class KVCache:
    """Keys and values of the running sequences: ``data[layer, key or value, slot, head, position]``."""

    def __init__(self, shape: KVShape, slots: int = 0, length: int = 0) -> None:
        self.shape = shape
        self.data = self._make(slots, length)
        self.experts = self._make_experts(slots, length)
        """Chosen experts, ``[slot, position, layer, choice]``; ``None`` where they are not recorded."""

    def _make(self, slots: int, length: int) -> Tensor:
        # Zeros, not uninitialized memory: attention reads past a sequence's end and masks the result.
        s = self.shape
        size = s.layers, 2, slots, s.heads, length, s.dim
        if s.device.type == "cpu" and (count := slots * length * s.kv_bytes) >= _LAZY:
            return _lazy_zeros(count).view(s.dtype).view(size)
        return torch.zeros(size, dtype=s.dtype, device=s.device)

    def _make_experts(self, slots: int, length: int) -> Tensor | None:
        if (routing := self.shape.routing) is None:
            return None
        size = slots, length, routing.layers, routing.choices
        return torch.zeros(size, dtype=routing.dtype, device=self.shape.device)

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
        if (known := self.experts) is not None:
            self.experts = fresh = self._make_experts(slots, length)
            assert fresh is not None
            fresh[:n, :m] = known[:n, :m]

    def load(self, slot: int, start: int, block: KVBlock, count: int) -> None:
        """Copy the first ``count`` tokens of a block to a position of a slot."""
        self.data[:, :, slot, :, start : start + count] = block.kv[:, :, :, :count]
        if self.experts is not None and block.experts is not None:
            self.experts[slot, start : start + count] = block.experts[:count]

    def read(self, slot: int, start: int, end: int) -> KVBlock:
        """Return a view of a slot's tokens."""
        experts = None if self.experts is None else self.experts[slot, start:end]
        return KVBlock(self.data[:, :, slot, :, start:end], experts)

    def move(self, source: int, target: int, count: int) -> None:
        """Copy a slot's first ``count`` tokens to another."""
        self.data[:, :, target, :, :count] = self.data[:, :, source, :, :count]
        if self.experts is not None:
            self.experts[target, :count] = self.experts[source, :count]

    def wipe(self, slot: int) -> None:
        """Zero a slot that may contain NaN."""
        self.data[:, :, slot] = 0
