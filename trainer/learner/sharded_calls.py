"""Batches for ranks in a Ray cluster: stored once, in shards, and fetched by the ranks that need them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.cluster.errors import need_ray
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.data.sharding import (
    ArrayOutline,
    BatchOutline,
    ShardedBatch,
    ShardStore,
    cut,
    cut_arrays,
)


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch in the object store, as it is sent to ranks: two references."""

    tokens: Any
    """Of a `BatchOutline` and the references of its token shards."""
    arrays: Any
    """Of an `ArrayOutline` and the references of the shards of the arrays."""


class BatchStore:
    """Stores the batch of a step once, for all passes over it and all roles that share the store.

    Tokens are stored with the first pass, and arrays with an update: other passes read none. What was stored
    is kept until there is another batch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # policy and critic train at the same time
        self._batch: Batch | None = None
        self._outline: BatchOutline | None = None
        self._tokens: Any = None
        self._arrays: Any = None
        self._of_arrays: Batch | None = None
        self.stored_bytes = 0
        """Bytes of all tokens and arrays stored so far."""

    def store(self, batch: Batch, ranks: int, *, room: int, padded: bool, arrays: bool) -> StoredBatch:
        """Store what is not stored yet; see `rollgym.trainer.data.sharding.cut`."""
        ray = need_ray()
        with self._lock:
            if self._batch is None or self._batch.episodes is not batch.episodes:
                self.clear()
                self._outline, shards = cut(batch, ranks, room=room, padded=padded)
                self._tokens = ray.put((self._outline, [ray.put(shard) for shard in shards]))
                self._batch = batch
                self.stored_bytes += sum(shard.nbytes for shard in shards)
            if arrays and (self._of_arrays is None or not _same_arrays(self._of_arrays, batch)):
                assert self._outline is not None
                shape, parts = cut_arrays(batch, self._outline)
                self._arrays = ray.put((shape, [ray.put(part) for part in parts]))
                self._of_arrays = batch
                self.stored_bytes += sum(array.nbytes for part in parts for array in part.values())
            return StoredBatch(self._tokens, self._arrays if arrays else None)

    def clear(self) -> None:
        """Forget the batch: its memory in the object store is freed once no rank reads it."""
        self._batch = self._of_arrays = self._outline = None
        self._tokens = self._arrays = None


class BatchReader:
    """Opens stored batches in a rank; keeps the tokens that it fetched for further passes."""

    def __init__(self) -> None:
        self._ref: Any = None
        self._outline: BatchOutline | None = None
        self._store = ShardStore(_fetch([]))

    def open(self, stored: StoredBatch) -> ShardedBatch:
        """Return the batch; its tokens and arrays are fetched later."""
        ray = need_ray()
        if self._outline is None or self._ref != stored.tokens:
            self._outline, refs = ray.get(stored.tokens)
            self._ref, self._store = stored.tokens, ShardStore(_fetch(refs))
        assert self._outline is not None
        if stored.arrays is None:
            return ShardedBatch(self._outline, self._store)
        shape: ArrayOutline
        shape, refs = ray.get(stored.arrays)
        return ShardedBatch(self._outline, self._store, shape=shape, fetch_arrays=_fetch(refs))


def _fetch(refs: Sequence[Any]) -> Any:
    def fetch(numbers: Sequence[int]) -> Any:
        return need_ray().get([refs[number] for number in numbers])

    return fetch


def _same_arrays(one: Batch, other: Batch) -> bool:
    return one.arrays.keys() == other.arrays.keys() and all(
        one.arrays[name] is other.arrays[name] for name in one.arrays
    )
