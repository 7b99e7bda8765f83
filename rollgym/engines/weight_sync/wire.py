"""What a learner's ranks send: parts of tensors, in the engine's dtype, whole or as a delta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollgym.core.errors import UsageError
from rollgym.engines.weight_sync.delta import WORDS, Delta, Words, changed, checksum, make_delta

_WORTH = 0.75
"""A delta of more than this fraction of the whole bytes is sent whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """The format in which weights travel."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype that the engine computes in; see `wire_dtype`."""
    delta: bool = False
    """Send only the values that changed since the update before."""
    full_every: int = 16
    """With ``delta``: every n-th update is whole."""
    folder: Path | None = None
    """Send as files in this folder, which all nodes can read and write, instead of by the object store."""

    def __post_init__(self) -> None:
        if self.full_every < 1:
            raise UsageError(f"full_update_every must be at least 1, not {self.full_every}.")


class LocalShard(NamedTuple):
    """The values of a tensor that a rank sends; the ranks together send each value once."""

    tensor: Tensor
    view: tuple[int, ...]
    """Shape of the whole tensor, or its number of values where the shard is a range of the flat tensor."""
    offsets: tuple[int, ...]
    """Position of the shard in ``view``."""


class Chunk(NamedTuple):
    """A `LocalShard` as it is sent."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    view: tuple[int, ...]
    offsets: tuple[int, ...]
    size: tuple[int, ...]
    """Shape of the shard."""
    arrays: tuple[np.ndarray[Any, Any], ...]
    """The bytes of the values, or a `Delta`."""
    checksum: int
    """Of the values after the update."""

    @property
    def whole(self) -> bool:
        """Whether it has all values, not only changed ones."""
        return len(self.arrays) == 1

    @property
    def covers_all(self) -> bool:
        """Whether the shard is the whole tensor."""
        return self.size == self.view


Part = list[Chunk]
"""What one rank sends of one bucket."""


class Sent(NamedTuple):
    """Counts of what was sent."""

    nbytes: int = 0
    values: int = 0
    changed: int = 0
    """Values that differ from those of the update before; all values of a full update."""

    def plus(self, other: Sent) -> Sent:
        """Return the sum."""
        return Sent(*(a + b for a, b in zip(self, other, strict=True)))


def wire_dtype(tensor_dtype: torch.dtype, shape: Sequence[int], dtype: str) -> torch.dtype:
    """Return the dtype in which a tensor is sent to an engine that computes in ``dtype``.

    Vectors (biases, norms, scales of routers) stay as they are: an engine may keep some of them in float32,
    and they are a thousandth of the bytes.
    """
    wanted: torch.dtype = getattr(torch, dtype)
    if len(shape) < 2 or not tensor_dtype.is_floating_point or tensor_dtype.itemsize <= wanted.itemsize:
        return tensor_dtype
    return wanted


def to_wire(tensor: Tensor, dtype: str) -> Tensor:
    """Return a copy of a tensor on the CPU in the dtype in which it is sent."""
    to = wire_dtype(tensor.dtype, tensor.shape, dtype)
    return tensor.detach().to("cpu", to, copy=True).contiguous()


def wire_bytes(tensors: Sequence[Tensor], dtype: str) -> int:
    """Return the bytes of a full update."""
    return sum(one.numel() * wire_dtype(one.dtype, one.shape, dtype).itemsize for one in tensors)


def words_of(tensor: Tensor) -> Words:
    """Return the words of a contiguous tensor on the CPU, without a copy."""
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().view(WORDS[flat.element_size()])


class ShardEncoder:
    """Encodes the shards of one rank, and remembers what it sent last."""

    def __init__(self, wire: WireFormat) -> None:
        self.wire = wire
        self._last: dict[str, Words] = {}

    def encode(self, name: str, shape: Sequence[int], shard: LocalShard, *, full: bool) -> tuple[Chunk, Sent]:
        """Return a shard as it is sent, and its counts.

        Args:
            name: The tensor's name.
            shape: The whole tensor's shape.
            shard: This rank's values.
            full: Send all values.
        """
        to = wire_dtype(shard.tensor.dtype, shape, self.wire.dtype)
        # What is compared with the next version must not change with the learner's weights.
        tensor = shard.tensor.detach().to("cpu", to, copy=self.wire.delta).contiguous()
        last = None if full else self._last.get(name)
        if self.wire.delta:
            self._last[name] = words_of(tensor)
        return make_chunk(name, shape, shard._replace(tensor=tensor), last)


def make_chunk(name: str, shape: Sequence[int], shard: LocalShard, last: Words | None) -> tuple[Chunk, Sent]:
    """Return a shard as it is sent, and its counts: as a delta where that is shorter than its values.

    Args:
        name: The tensor's name.
        shape: The whole tensor's shape.
        shard: Values on the CPU, in the dtype in which they are sent.
        last: The values that the receiver has; ``None``: it has none.
    """
    words = words_of(shard.tensor)
    arrays: tuple[np.ndarray[Any, Any], ...] = (words.view(np.uint8),)
    count = len(words)
    if last is not None and len(last) == len(words):
        indices = changed(words, last)
        count = len(indices)
        if 2 * count < _WORTH * words.nbytes:
            delta = make_delta(words, last, indices)
            if delta.nbytes < _WORTH * words.nbytes:
                arrays = tuple(delta)
    chunk = Chunk(
        name,
        tuple(shape),
        str(shard.tensor.dtype).removeprefix("torch."),
        shard.view,
        shard.offsets,
        tuple(shard.tensor.shape),
        arrays,
        checksum(words),
    )
    return chunk, Sent(sum(array.nbytes for array in arrays), len(words), count)


def delta_of(chunk: Chunk) -> Delta:
    """Return the delta of a chunk that is not whole."""
    return Delta(*chunk.arrays)
