"""Weights in Ray's object store: written in buckets by the ranks that have them, read by reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollgym.cluster.errors import need_ray
from rollgym.engines.base import WeightSource
from rollgym.engines.weight_sync.chain import Link, WeightChain
from rollgym.engines.weight_sync.folder import PartFile
from rollgym.engines.weight_sync.wire import LocalShard, Part, Sent, ShardEncoder, WireFormat

BUCKET = 256 * 2**20
"""Bytes per bucket; a larger tensor gets its own bucket."""
Named = Sequence[tuple[str, Any]]
"""Named tensors."""


class StoredPart:
    """A part in the object store, which readers on the same node share."""

    shared = True

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def read(self) -> Part:
        """Fetch it to this node."""
        part: Part = need_ray().get(self._ref)
        return part


class StoredFile:
    """A file with a part; the object store has its path."""

    shared = True

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def read(self) -> Part:
        """Read the file."""
        file: PartFile = need_ray().get(self._ref)
        return file.read()


def share_tensors(tensors: Mapping[str, Any], bucket: int = BUCKET) -> WeightChain:
    """Store a copy of the tensors."""
    parts: list[list[tuple[str, Any]]] = []
    size = 0
    for name, tensor in tensors.items():
        need = tensor.numel() * tensor.element_size()
        if not parts or size + need > bucket:
            parts.append([])
            size = 0
        parts[-1].append((name, tensor))
        size += need
    return share_buckets(parts)


def share_buckets(parts: Iterable[Named]) -> WeightChain:
    """Store tensors bucket by bucket, as they arrive."""
    encoder, link = ShardEncoder(WireFormat()), Link()
    for bucket in parts:
        part: Part = []
        sent = Sent()
        for name, tensor in bucket:
            shape = tuple(tensor.shape)
            chunk, counts = encoder.encode(
                name, shape, LocalShard(tensor, shape, (0,) * len(shape)), full=True
            )
            part.append(chunk)
            sent = sent.plus(counts)
        link.publish([StoredPart(need_ray().put(part))], sent)
    link.end()
    return WeightChain([link])


def share_weights(weights: WeightSource) -> WeightSource:
    """Store weights once, so that several engines can read them."""
    if weights.buckets is not None:
        return WeightSource(tensors=share_buckets(weights.buckets()))
    if weights.tensors is None or isinstance(weights.tensors, WeightChain):
        return weights
    return WeightSource(tensors=share_tensors(weights.tensors))
