"""A batch in shards: each rank reads the rows that it trains on, and nothing else.

`cut` splits the tokens of a batch into shards, which are stored once for all passes over the batch. A
`BatchOutline` has what every rank needs to know about all rows: their lengths, overlaps and counts, but no
tokens. From it all ranks compute the same partition, and each fetches the shards of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgym.core.routed_experts import ExpertArray
from rollgym.trainer.data.batch import Batch, balanced
from rollgym.trainer.data.packing import RowIndex, bundles
from rollgym.trainer.data.sequences import FloatArray, IntArray, TokenEpisode, TokenSequence

SHARD_BYTES = 1 << 20
"""Approximate bytes of tokens per shard: a rank that needs one row fetches this much at most."""

Fetch = Callable[[Sequence[int]], Sequence[Any]]
"""Returns the shards with these numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenShard:
    """The tokens of some rows, or the final tokens of some episodes."""

    rows: list[int]
    ids: NDArray[Any]
    """The ids of all rows, end to end."""
    positions: NDArray[Any]
    """Their action positions."""
    counts: list[tuple[int, int]]
    """For each row, the numbers of both."""
    targets: dict[int, NDArray[Any]]
    """By row, where a row has them."""
    experts: dict[int, ExpertArray]
    """Likewise."""

    def __iter__(self) -> Iterator[tuple[int, TokenSequence]]:
        ids_at = positions_at = 0
        for row, (num_ids, num_positions) in zip(self.rows, self.counts, strict=True):
            ids = self.ids[ids_at : ids_at + num_ids].astype(np.int64)
            positions = self.positions[positions_at : positions_at + num_positions].astype(np.int64)
            ids_at, positions_at = ids_at + num_ids, positions_at + num_positions
            targets = self.targets.get(row)
            given = None if targets is None else targets.astype(np.int64)
            yield row, TokenSequence(ids, positions, given, self.experts.get(row))

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        some = [*self.targets.values(), *self.experts.values()]
        return self.ids.nbytes + self.positions.nbytes + sum(array.nbytes for array in some)


@dataclass(frozen=True, slots=True, eq=False)
class BatchOutline:
    """What every rank knows about all rows and episodes of a batch."""

    index: RowIndex
    episode_of: IntArray
    starts: IntArray
    final_lengths: list[int]
    shard_of_row: IntArray
    """[sequences] The token shard of each, which is also that of its arrays."""
    shard_of_final: dict[int, int]
    """By episode, the token shard with its final ids."""
    rows: list[list[int]]
    """The rows of each shard."""
    has_experts: bool = False
    """Whether an engine recorded the experts of any token."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayOutline:
    """What every rank knows about the arrays of a batch."""

    names: list[str]
    rows_with_advantages: NDArray[np.bool_] | None
    trained_tokens: IntArray
    same: list[tuple[str, str]]
    """Pairs of names of one array."""


def cut(batch: Batch, ranks: int, *, room: int, padded: bool) -> tuple[BatchOutline, list[TokenShard]]:
    """Cut the tokens of a batch into shards.

    The rows of a shard belong to one rank in a pass over all rows. Other passes give rows to other ranks,
    which then fetch more shards: the cut decides what is sent, never what is computed.

    Args:
        batch: The batch.
        ranks: Number of ranks.
        room: Maximum tokens per micro-batch.
        padded: Whether micro-batches are padded.
    """
    index = batch.index
    sets = bundles(index, 0 if padded else min(room, int(index.lengths.sum()) // (2 * ranks)))
    shards: list[TokenShard] = []
    rows: list[list[int]] = []
    shard_of_row = np.zeros(len(batch.sequences), dtype=np.int64)
    for share in balanced([float(cost) for _, cost in sets], ranks):
        own = [row for number in share for row in sets[number][0]]
        for part in _parts(own, [_row_bytes(batch.sequences[row]) for row in own]):
            shard_of_row[part] = len(shards)
            shards.append(_shard(part, [batch.sequences[row] for row in part]))
            rows.append(part)
    finals = {number: e.final_ids for number, e in enumerate(batch.episodes) if e.final_ids is not None}
    shard_of_final: dict[int, int] = {}
    numbers = list(finals)
    for share in balanced([float(len(finals[number])) for number in numbers], ranks):
        own = [numbers[i] for i in share]
        for part in _parts(own, [4 * len(finals[number]) for number in own]):
            shard_of_final |= dict.fromkeys(part, len(shards))
            none = np.zeros(0, dtype=np.int64)
            shards.append(_shard(part, [TokenSequence(finals[number], none) for number in part]))
            rows.append([])
    outline = BatchOutline(
        index,
        batch.episode_of,
        batch.starts,
        batch.final_lengths,
        shard_of_row,
        shard_of_final,
        rows,
        batch.has_experts,
    )
    return outline, shards


def cut_arrays(batch: Batch, outline: BatchOutline) -> tuple[ArrayOutline, list[dict[str, NDArray[Any]]]]:
    """Cut the arrays of a batch into the shards of its rows."""
    names = sorted(batch.arrays)
    same = [
        (name, other)
        for at, name in enumerate(names)
        for other in names[:at]
        if batch.arrays[name] is batch.arrays[other]
    ]
    sent = [name for name in names if name not in dict(same)]
    advantages = batch.rows_with_advantages if "advantages" in batch.arrays else None
    shards = []
    for rows in outline.rows:
        at = batch.token_indices(rows)
        shards.append({name: _narrow(batch.arrays[name][at]) for name in sent} if rows else {})
    return ArrayOutline(sent, advantages, batch.trained_tokens, same), shards


class ShardedBatch(Batch):
    """A batch whose tokens and arrays are fetched when they are needed.

    Arrays have their full length, and zeros where no row was fetched: pages that nothing is written to take
    no memory.
    """

    __slots__ = ("_fetch_arrays", "_fetched", "_outline", "_shape", "_store")
    _outline: BatchOutline
    _store: ShardStore
    _shape: ArrayOutline | None
    _fetch_arrays: Fetch | None
    _fetched: set[int]

    def __init__(
        self,
        outline: BatchOutline,
        store: ShardStore,
        arrays: Mapping[str, FloatArray] | None = None,
        shape: ArrayOutline | None = None,
        fetch_arrays: Fetch | None = None,
        fetched: set[int] | None = None,
    ) -> None:
        values: dict[str, Any] = {
            "episodes": _FinalEpisodes(store, outline),
            "sequences": _Rows(store, outline),
            "episode_of": outline.episode_of,
            "starts": outline.starts,
            "_index": [outline.index],
            "_outline": outline,
            "_store": store,
            "_shape": shape,
            "_fetch_arrays": fetch_arrays,
            "_fetched": set() if fetched is None else fetched,
            "arrays": dict(arrays or {}),
        }
        if shape is not None and arrays is None:
            values["arrays"] = {name: np.zeros(int(outline.starts[-1])) for name in shape.names}
            values["arrays"] |= {name: values["arrays"][other] for name, other in shape.same}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def with_arrays(self, **arrays: FloatArray) -> ShardedBatch:
        """Return the batch with additional arrays, which are whole."""
        return ShardedBatch(
            self._outline,
            self._store,
            {**self.arrays, **arrays},
            self._shape,
            self._fetch_arrays,
            self._fetched,
        )

    def fetch(self, sequences: Sequence[int]) -> None:
        """Fetch the tokens and arrays of these sequences, all at once."""
        needed = sorted(set(self._outline.shard_of_row[list(sequences)].tolist()))
        self._store.fetch(needed)
        missing = [number for number in needed if number not in self._fetched]
        if self._fetch_arrays is None or self._shape is None or not missing:
            return
        for number, shard in zip(missing, self._fetch_arrays(missing), strict=True):
            at = self.token_indices(self._outline.rows[number])
            for name, values in shard.items():
                self.arrays[name][at] = values
            self._fetched.add(number)

    @property
    def final_lengths(self) -> list[int]:
        """Number of tokens after which each episode's final state is valued; 0 if it is not."""
        return self._outline.final_lengths

    @property
    def has_experts(self) -> bool:
        """Whether an engine recorded the experts of any token."""
        return self._outline.has_experts

    @property
    def rows_with_advantages(self) -> NDArray[np.bool_]:
        """[sequences] Whether any token that is trained on has an advantage other than 0."""
        assert self._shape is not None
        assert self._shape.rows_with_advantages is not None
        return self._shape.rows_with_advantages

    @property
    def trained_tokens(self) -> IntArray:
        """[sequences] Number of tokens that are trained on."""
        return np.diff(self.starts) if self._shape is None else self._shape.trained_tokens


class ShardStore:
    """The shards of a batch's tokens that this process has fetched so far."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._shards: dict[int, dict[int, TokenSequence]] = {}

    def fetch(self, numbers: Sequence[int]) -> None:
        """Fetch the shards that are not here yet."""
        missing = [number for number in numbers if number not in self._shards]
        for number, shard in zip(missing, self._fetch(missing) if missing else (), strict=True):
            self._shards[number] = dict(iter(shard))

    def row(self, shard: int, row: int) -> TokenSequence:
        """Return a row of a shard."""
        self.fetch([shard])
        return self._shards[shard][row]


class _Rows(Sequence[Any]):
    def __init__(self, store: ShardStore, outline: BatchOutline) -> None:
        self._store, self._outline = store, outline

    def __len__(self) -> int:
        return len(self._outline.shard_of_row)

    def __getitem__(self, row: Any) -> Any:
        return self._store.row(int(self._outline.shard_of_row[row]), int(row))


class _FinalEpisodes(Sequence[Any]):
    """The episodes, of which only ``final_ids`` can be read."""

    def __init__(self, store: ShardStore, outline: BatchOutline) -> None:
        self._store, self._outline = store, outline

    def __len__(self) -> int:
        return len(self._outline.final_lengths)

    def __getitem__(self, number: Any) -> Any:
        final_ids = None
        if (shard := self._outline.shard_of_final.get(int(number))) is not None:
            final_ids = self._store.row(shard, int(number)).ids
        none = np.zeros(0, dtype=np.int64)
        return TokenEpisode(str(number), (), np.zeros(0), none, final_ids)


def _row_bytes(row: TokenSequence) -> int:
    """About the bytes of a row in a shard."""
    return 8 * len(row.ids) + (0 if row.experts is None else row.experts.nbytes)


def _parts(rows: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    part: list[int] = []
    total = 0
    for row, size in zip(rows, sizes, strict=True):
        if part and total + size > SHARD_BYTES:
            yield part
            part, total = [], 0
        part.append(row)
        total += size
    if part:
        yield part


def _shard(rows: list[int], sequences: Sequence[TokenSequence]) -> TokenShard:
    return TokenShard(
        rows,
        _narrow(np.concatenate([sequence.ids for sequence in sequences])),
        _narrow(np.concatenate([sequence.action_positions for sequence in sequences])),
        [(len(sequence.ids), len(sequence.action_positions)) for sequence in sequences],
        {row: s.targets for row, s in zip(rows, sequences, strict=True) if s.targets is not None},
        {row: s.experts for row, s in zip(rows, sequences, strict=True) if s.experts is not None},
    )


def _narrow(array: NDArray[Any]) -> NDArray[Any]:
    """The numbers in 32 bits where that loses nothing."""
    with np.errstate(over="ignore"):
        narrow = array.astype(f"{array.dtype.kind}4")
    return narrow if np.array_equal(narrow, array, equal_nan=array.dtype.kind == "f") else array
