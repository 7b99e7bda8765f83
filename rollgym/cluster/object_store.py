"""Tensors in Ray's object store: written once, in buckets, and read by reference."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollgym.cluster.errors import need_ray
from rollgym.engines.base import WeightSource

BUCKET = 256 * 2**20
"""Bytes per bucket; a larger tensor gets its own bucket."""

Flat = tuple[str, tuple[int, ...], Any]
"""A tensor's dtype, shape and bytes as a numpy array, which readers on the same node share."""


class SharedTensors(Mapping[str, Any]):
    """Tensors by name, in the object stores of the cluster. Buckets are fetched on first access."""

    def __init__(self, names: Mapping[str, int], buckets: list[Any]) -> None:
        self._names = dict(names)
        self._buckets = buckets
        self._read: dict[int, dict[str, Flat]] = {}

    def __getitem__(self, name: str) -> Any:
        number = self._names[name]
        if number not in self._read:
            self._read[number] = need_ray().get(self._buckets[number])
        return _tensor(self._read[number][name])

    def fetch(self) -> None:
        """Fetch all buckets to this node."""
        for number, bucket in enumerate(self._buckets):
            self._read[number] = need_ray().get(bucket)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedTensors, (self._names, self._buckets)


def share_tensors(tensors: Mapping[str, Any], bucket: int = BUCKET) -> SharedTensors:
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


def share_buckets(parts: Iterable[Sequence[tuple[str, Any]]]) -> SharedTensors:
    """Store tensors bucket by bucket, as they arrive."""
    names: dict[str, int] = {}
    refs: list[Any] = []
    for part in parts:
        names |= dict.fromkeys((name for name, _ in part), len(refs))
        refs.append(need_ray().put({name: _flat(tensor) for name, tensor in part}))
    return SharedTensors(names, refs)


def share_weights(weights: WeightSource) -> WeightSource:
    """Store weights once, so that several engines can read them."""
    if weights.buckets is not None:
        return WeightSource(tensors=share_buckets(weights.buckets()))
    if weights.tensors is None or isinstance(weights.tensors, SharedTensors):
        return weights
    return WeightSource(tensors=share_tensors(weights.tensors))


def _flat(tensor: Any) -> Flat:
    import torch

    plain = tensor.detach().cpu().contiguous()
    kind = str(plain.dtype).removeprefix("torch.")
    # Through bytes: numpy has no bfloat16.
    return kind, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy()


def _tensor(flat: Flat) -> Any:
    import torch

    kind, shape, data = flat
    with warnings.catch_warnings():
        # The store is read-only; readers copy the tensors.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(data).view(getattr(torch, kind)).reshape(shape)
