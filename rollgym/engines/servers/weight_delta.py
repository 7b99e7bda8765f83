"""Deltas to servers: of an update, the tensors or values that changed since the one before."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from rollgym.core.errors import UsageError
from rollgym.engines.weight_sync.server_plugin.rollgym_deltas import PACKED, Header, TensorEntry, pack
from rollgym.engines.weight_sync.wire import Chunk, LocalShard, Sent, make_chunk, words_of

Bucket = Sequence[tuple[str, Tensor]]


class DeltaUpdate(NamedTuple):
    """An update as it is sent."""

    stamp: str
    full: bool
    """Whether it has all tensors."""
    buckets: list[Bucket]
    sent: Sent


class DeltaEncoder:
    """Encodes updates as changes of the weights that the servers have.

    It keeps the tensors of the last update, which must not change any more.

    Args:
        full_every: Every n-th update has all tensors.
    """

    def __init__(self, full_every: int) -> None:
        if full_every < 1:
            raise UsageError(f"full_update_every must be at least 1, not {full_every}.")
        self._full_every = full_every
        self._base: Mapping[str, Tensor] = {}
        self._stamp: str | None = None
        """The update whose weights all servers have; ``None``: not known."""
        self.version: str | None = None
        """Name of the version of these weights."""
        self._packed = False
        """Whether they keep a copy of it."""
        self._since_full = 0

    def reset(self) -> None:
        """Forget what the servers have: the next update has all tensors."""
        self._base, self._stamp, self.version = {}, None, None

    def encode(self, tensors: Mapping[str, Tensor], *, packed: bool, bucket: int) -> DeltaUpdate:
        """Return an update.

        Args:
            tensors: All weights.
            packed: The servers apply changes of values; if not, tensors are sent whole or not at all.
            bucket: Bytes per bucket.
        """
        full = (
            self._stamp is None
            or self._since_full + 1 >= self._full_every
            or (packed and not self._packed)
            or self._base.keys() != tensors.keys()
        )
        stamp = uuid.uuid4().hex
        chunks = list(self._chunks(tensors, full=full))
        total = Sent()
        for _, sent in chunks:
            total = total.plus(sent)
        # At least one tensor, because the version of the weights is set with a bucket.
        changed = [chunk for chunk, sent in chunks if sent.changed] or [chunks[0][0]]
        groups = list(_groups(changed, tensors, packed, bucket))
        if not packed:
            nbytes = sum(tensors[chunk.name].nbytes for chunk in changed)
            buckets: list[Bucket] = [[(one.name, tensors[one.name]) for one in group] for group in groups]
            return DeltaUpdate(stamp, full, buckets, total._replace(nbytes=nbytes))
        base = None if full else self._stamp
        buckets = [
            [(PACKED, _packed(group, stamp, base, number == 0, number == len(groups) - 1))]
            for number, group in enumerate(groups)
        ]
        nbytes = sum(tensor.nbytes for group in buckets for _, tensor in group)
        return DeltaUpdate(stamp, full, buckets, total._replace(nbytes=nbytes))

    def received(
        self, update: DeltaUpdate, tensors: Mapping[str, Tensor], version: str, *, packed: bool
    ) -> None:
        """Note that all servers have these weights now, under this name of their version."""
        self._base, self._stamp, self._packed = tensors, update.stamp, packed
        self.version = version
        self._since_full = 0 if update.full else self._since_full + 1

    def _chunks(self, tensors: Mapping[str, Tensor], *, full: bool) -> Iterator[tuple[Chunk, Sent]]:
        for name, tensor in tensors.items():
            last = None if full else self._base[name]
            if last is not None and (last.dtype, last.shape) != (tensor.dtype, tensor.shape):
                last = None
            shape = tuple(tensor.shape)
            shard = LocalShard(tensor, shape, (0,) * len(shape))
            yield make_chunk(name, shape, shard, None if last is None else words_of(last))


def _groups(
    chunks: Sequence[Chunk], tensors: Mapping[str, Tensor], packed: bool, size: int
) -> Iterator[list[Chunk]]:
    """Divide chunks into buckets by the bytes that are sent of them."""
    group: list[Chunk] = []
    held = 0
    for chunk in chunks:
        nbytes = sum(array.nbytes for array in chunk.arrays) if packed else tensors[chunk.name].nbytes
        if group and held + nbytes > size:
            yield group
            group, held = [], 0
        group.append(chunk)
        held += nbytes
    yield group


def _packed(chunks: Sequence[Chunk], stamp: str, base: str | None, first: bool, last: bool) -> Tensor:
    entries: list[TensorEntry] = [
        {
            "name": chunk.name,
            "dtype": chunk.dtype,
            "shape": chunk.shape,
            "sizes": [array.nbytes for array in chunk.arrays],
            "checksum": chunk.checksum,
        }
        for chunk in chunks
    ]
    header: Header = {"stamp": stamp, "base": base, "first": first, "last": last, "tensors": entries}
    return pack(header, [array for chunk in chunks for array in chunk.arrays])
