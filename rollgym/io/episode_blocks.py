"""Training episodes in compressed, columnar blocks, appended to one file.

A block holds some episodes of one training step. Token ids, log-probs and their counts are columns of
numbers; everything else of an episode is a row of JSON. Each column is compressed on its own, so a reader
that needs no tokens decompresses none. The head of a block names its step, its episode ids and its columns:
these heads are the index of the file, and a reader goes from head to head without reading what is between.

    block   = magic (8) | size of head (4) | size of columns (8) | CRC-32 (4) | head (JSON) | columns
    columns = one after another, in the order of the head

A block counts once all of it is there, so the file can be read while it is written, and a process that is
killed while writing leaves the blocks before. Integers are stored in 32 bits and log-probs in float32 where
that loses nothing, otherwise in 64 bits: an episode that is read equals the one that was written.
"""

from __future__ import annotations

import importlib
import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rollgym.core.errors import ResultsError, os_reason
from rollgym.core.files import open_inside
from rollgym.core.serialization import encode_episode, jsonable
from rollgym.core.types import SCHEMA_VERSION, Episode, Turn

BLOCK_TOKENS = 4_000_000
"""A block ends after about this many tokens, `BLOCK_EPISODES` episodes or `BLOCK_TEXT` bytes of rows."""
BLOCK_EPISODES = 1024
BLOCK_TEXT = 64_000_000
MAX_HEAD = 16_000_000
"""Maximum bytes of a block's head."""
MAX_COLUMN = 1_000_000_000
"""Maximum bytes of a column that is read; one that claims more is damaged."""

_MAGIC = b"RGBLOCK1"
_PREFIX = struct.Struct("<8sIQI")
_ZSTD_LEVEL, _ZLIB_LEVEL = 3, 3

Decompress = Callable[[bytes, int], bytes]
Values = Mapping[str, Sequence[float | None]]
"""Values of an episode's action tokens by name: ``advantages``, ``ratios``."""


class StoredEpisode(NamedTuple):
    """A training episode as a run folder holds it."""

    episode: Episode
    step: int | None
    """The training step that used it."""
    values: Values
    """Values of its action tokens, where they were saved."""
    action_tokens: int
    """Their number, which is also known where tokens were not read."""


class _Column(msgspec.Struct, frozen=True):
    name: str
    kind: str
    """Of numpy; ``json`` for text."""
    size: int
    raw: int


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    codec: str
    step: int | None
    ids: list[str]
    columns: list[_Column]


_head_decoder = msgspec.json.Decoder(_Head)
_TOKENS = ("prompt_ids", "action_ids", "logprobs")
"""Fields of a turn that are columns. ``final_ids`` of an episode are one, too."""
_turn_fields = tuple(field.name for field in fields(Turn) if field.name not in _TOKENS)
_episode_fields = tuple(field.name for field in fields(Episode) if field.name not in ("turns", "final_ids"))
_turn_values, _episode_values = attrgetter(*_turn_fields), attrgetter(*_episode_fields)
# Made from the classes, so that a field that is added to them is stored as well.
_TurnRow: Any = msgspec.defstruct("_TurnRow", [(name, Any) for name in _turn_fields])
_EpisodeRow: Any = msgspec.defstruct("_EpisodeRow", [(name, Any) for name in (*_episode_fields, "turns")])


# --- writing


def encode_blocks(
    step: int | None, episodes: Sequence[Episode], values: Sequence[Values] = ()
) -> Iterator[bytes]:
    """Encode the episodes of a step as one block or several.

    Args:
        step: The training step that used them.
        episodes: Its episodes, in order.
        values: For each episode, values of its action tokens by name.

    Example:
        >>> data = b"".join(encode_blocks(7, episodes))
    """
    first = tokens = text = 0
    rows: list[bytes] = []
    for number, episode in enumerate(episodes):
        rows.append(_row(episode))
        text += len(rows[-1])
        tokens += sum(len(turn.prompt_ids) + len(turn.action_ids) for turn in episode.turns)
        last = number + 1 == len(episodes)
        full = tokens >= BLOCK_TOKENS or len(rows) >= BLOCK_EPISODES or text >= BLOCK_TEXT
        if last or full:
            yield _encode_block(step, episodes[first : number + 1], rows, values[first : number + 1])
            first, tokens, text, rows = number + 1, 0, 0, []


def _encode_block(
    step: int | None, episodes: Sequence[Episode], rows: Sequence[bytes], values: Sequence[Values]
) -> bytes:
    turns = [turn for episode in episodes for turn in episode.turns]
    columns: list[tuple[str, npt.NDArray[Any] | bytes]] = [
        ("rows", b"\n".join(rows)),
        ("turns", _counts([episode.turns for episode in episodes])),
    ]
    for name in _TOKENS:
        parts = [getattr(turn, name) for turn in turns]
        columns += [(f"{name}_counts", _counts(parts)), (name, _joined(name, parts))]
    finals = [episode.final_ids for episode in episodes]
    columns += [("final_ids_counts", _counts(finals)), ("final_ids", _joined("final_ids", finals))]
    if values:
        columns.append(("values", msgspec.json.encode(list(values))))
    codec, compress = _compressor()
    heads, data = [], []
    for name, column in columns:
        kind, raw = ("json", column) if isinstance(column, bytes) else (column.dtype.str, _shuffled(column))
        packed = compress(raw)
        heads.append(_Column(name, kind, len(packed), len(raw)))
        data.append(packed)
    ids = [episode.spec.episode_id for episode in episodes]
    schema = SCHEMA_VERSION
    head = _json(_Head(schema=schema, codec=codec, step=step, ids=ids, columns=heads))
    payload = b"".join(data)
    checksum = zlib.crc32(payload, zlib.crc32(head))
    return _PREFIX.pack(_MAGIC, len(head), len(payload), checksum) + head + payload


def _row(episode: Episode) -> bytes:
    turns = [_TurnRow(*_turn_values(turn)) for turn in episode.turns]
    return _json(_EpisodeRow(*_episode_values(episode), turns))


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # lone surrogates
        return msgspec.json.encode(jsonable(msgspec.to_builtins(value)))


def _counts(parts: Sequence[Sequence[Any]]) -> npt.NDArray[Any]:
    return np.fromiter(map(len, parts), np.int32, len(parts))


def _joined(name: str, parts: Sequence[Sequence[float]]) -> npt.NDArray[Any]:
    count = sum(map(len, parts))
    kind = np.float64 if name == "logprobs" else np.int64
    return _narrow(np.fromiter(itertools.chain.from_iterable(parts), kind, count))


def _narrow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The numbers in 32 bits where that loses nothing."""
    with np.errstate(over="ignore"):
        narrow = array.astype(f"{array.dtype.kind}4")
    return narrow if np.array_equal(narrow, array) else array


def _shuffled(array: npt.NDArray[Any]) -> bytes:
    """The bytes of an array, first the lowest byte of every number and so on: it compresses better."""
    return array.view(np.uint8).reshape(-1, array.itemsize).T.tobytes()


# --- reading


@dataclass(frozen=True, slots=True)
class Block:
    """A complete block of a file; its columns are read when they are asked for."""

    path: Path
    folder: Path | None
    start: int
    """Its position in the file."""
    end: int
    head: _Head
    _payload: int
    _checksum: int

    @property
    def step(self) -> int | None:
        """The training step that used its episodes."""
        return self.head.step

    @property
    def ids(self) -> list[str]:
        """The ids of its episodes."""
        return self.head.ids

    def read(self, *, tokens: bool = True) -> list[StoredEpisode]:
        """Decode the episodes.

        Args:
            tokens: Also token ids, log-probs, versions and values; without, these are empty.

        Raises:
            ResultsError: The block is damaged, or a newer rollgym wrote it.
        """
        return self._guarded(range(len(self.ids)), tokens)

    def read_one(self, index: int) -> StoredEpisode:
        """Decode one episode (see `read`)."""
        return self._guarded(range(index, index + 1), True)[0]

    def _guarded(self, chosen: range, tokens: bool) -> list[StoredEpisode]:
        try:
            return self._decode(chosen, tokens)
        except OSError as error:
            raise ResultsError(f"Cannot read {self.path}: {os_reason(error)}.") from None
        except (ValueError, TypeError, KeyError, IndexError, RecursionError, MemoryError) as error:
            raise ResultsError(f"{self.path}, block at byte {self.start}: not valid ({error}).") from None

    def _decode(self, chosen: range, tokens: bool) -> list[StoredEpisode]:
        if self.head.schema > SCHEMA_VERSION:
            raise ResultsError(
                f"{self.path}, block at byte {self.start}: written with schema {self.head.schema}, but this "
                f"rollgym reads up to {SCHEMA_VERSION}: upgrade rollgym to read it."
            )
        names = ["rows", "turns", "action_ids_counts"]
        if tokens:
            names += [f"{name}_counts" for name in (*_TOKENS, "final_ids")]
            names += [*_TOKENS, "final_ids", "values"]
        raw = self._columns(frozenset(names))
        lines = raw["rows"].split(b"\n")
        starts = _starts(raw["turns"])
        if len(lines) != len(self.ids) or len(raw["turns"]) != len(lines):
            raise ValueError(f"{len(lines)} rows for {len(self.ids)} ids")
        if len(raw["action_ids_counts"]) != starts[-1]:
            raise ValueError(f"{len(raw['action_ids_counts'])} counts for {starts[-1]} turns")
        values: Sequence[Values] = [{}] * len(lines)
        if "values" in raw:
            values = msgspec.json.decode(raw["values"], type=list[dict[str, list[float | None]]])
        rows = [msgspec.json.decode(lines[number], type=dict[str, Any]) for number in chosen]
        turns = [turn for row in rows for turn in row["turns"]]
        first, last = int(starts[chosen.start]), int(starts[chosen.stop])
        if tokens:
            for name in _TOKENS:
                for turn, part in zip(
                    turns, _parts(raw[name], raw[f"{name}_counts"], first, last), strict=True
                ):
                    turn[name] = part
            finals = _parts(raw["final_ids"], raw["final_ids_counts"], chosen.start, chosen.stop)
            for row, part in zip(rows, finals, strict=True):
                row["final_ids"] = part
        else:
            for turn in turns:
                turn["version_spans"] = ()
        counts = raw["action_ids_counts"]
        return [
            StoredEpisode(
                msgspec.convert(row, Episode),
                self.step,
                values[number],
                int(counts[starts[number] : starts[number + 1]].sum()),
            )
            for number, row in zip(chosen, rows, strict=True)
        ]

    def _columns(self, names: frozenset[str]) -> dict[str, Any]:
        decompress = _decompressor(self.head.codec)
        found: dict[str, Any] = {}
        with open_inside(self.path, self.folder) as file:
            at = self._payload
            for column in self.head.columns:
                if column.name in names:
                    found[column.name] = _read_column(file, at, column, decompress)
                at += column.size
        missing = names - found.keys() - {"values"}
        if missing:
            raise ValueError(f"it has no column {', '.join(sorted(missing))}")
        return found

    def check(self) -> bool:
        """Whether the block's bytes are those that were written."""
        with open_inside(self.path, self.folder) as file:
            file.seek(self.start + _PREFIX.size)
            checksum, left = 0, self.end - self.start - _PREFIX.size
            while left and (data := file.read(min(left, 1 << 22))):
                checksum, left = zlib.crc32(data, checksum), left - len(data)
        return left == 0 and checksum == self._checksum


def read_blocks(
    path: Path, start: int = 0, end: int | None = None, folder: Path | None = None
) -> Iterator[Block]:
    """The complete blocks between two positions; an incomplete last one is left out.

    With ``folder``, the file must be inside it: a link that leads out is not followed.

    Raises:
        ResultsError: The file cannot be read, or is damaged before its end.

    Example:
        >>> [(block.step, len(block.ids)) for block in read_blocks(Path("runs/lake/episodes.blocks"))]
        [(1, 128), (2, 128)]
    """
    try:
        with open_inside(path, folder) as file:
            size = os.fstat(file.fileno()).st_size
            stop = size if end is None else min(end, size)
            at = start
            while at < stop:
                block = _block_at(file.fileno(), path, folder, at, size)
                if block is None:
                    return
                yield block
                at = block.end
    except OSError as error:
        raise ResultsError(f"Cannot read {path}: {os_reason(error)}.") from None


def stored_episodes(
    path: Path, folder: Path | None = None, *, tokens: bool = True
) -> Iterator[StoredEpisode]:
    """All episodes of a file, block by block; none if it does not exist (see `read_blocks`)."""
    if path.exists() or path.is_symlink():
        for block in read_blocks(path, folder=folder):
            yield from block.read(tokens=tokens)


def complete_end(path: Path, end: int) -> int:
    """The end of the last complete block before a position; a last block with other bytes does not count.

    Raises:
        ResultsError: The file is damaged before that.
    """
    blocks = [block for block in read_blocks(path, 0, end) if block.end <= end]
    while blocks and not blocks[-1].check():
        blocks.pop()
    return blocks[-1].end if blocks else 0


def find_episode(path: Path, episode_id: str, folder: Path | None = None) -> StoredEpisode | None:
    """Read one episode by its id; ``None`` if the file does not contain it."""
    for block in read_blocks(path, folder=folder):
        if episode_id in block.ids:
            return block.read_one(block.ids.index(episode_id))
    return None


def episode_line(stored: StoredEpisode) -> bytes:
    """A stored episode as a line of ``episodes.jsonl``, without the newline."""
    head = b"{" if stored.step is None else b'{"step":%d,' % stored.step
    if stored.values:
        head += b'"tokens":' + msgspec.json.encode(stored.values) + b","
    return head + encode_episode(stored.episode)[1:]


def _block_at(descriptor: int, path: Path, folder: Path | None, at: int, size: int) -> Block | None:
    """The block at a position; ``None`` if it is not complete."""
    prefix = os.pread(descriptor, _PREFIX.size, at)
    if len(prefix) < _PREFIX.size:
        return None
    magic, head_size, payload_size, checksum = _PREFIX.unpack(prefix)
    if magic != _MAGIC or head_size > MAX_HEAD:
        raise ResultsError(f"{path} is damaged at byte {at}: no block starts there.")
    payload = at + _PREFIX.size + head_size
    if payload + payload_size > size:
        return None
    data = os.pread(descriptor, head_size, at + _PREFIX.size)
    try:
        head = _head_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ResultsError(f"{path} is damaged at byte {at}: {error}.") from None
    return Block(path, folder, at, payload + payload_size, head, payload, checksum)


def _read_column(file: IO[bytes], at: int, column: _Column, decompress: Decompress) -> Any:
    if not (0 <= column.raw <= MAX_COLUMN and 0 <= column.size <= MAX_COLUMN):
        raise ValueError(f"the column {column.name} claims {column.raw:,} bytes")
    file.seek(at)
    raw = decompress(file.read(column.size), column.raw)
    if len(raw) != column.raw:
        raise ValueError(f"the column {column.name} has {len(raw)} bytes, not {column.raw}")
    return raw if column.kind == "json" else _array(raw, column.kind)


def _array(raw: bytes, kind: str) -> npt.NDArray[Any]:
    if kind not in ("<i4", "<i8", "<f4", "<f8"):
        raise ValueError(f"{kind!r} is not a kind of column")
    dtype = np.dtype(kind)
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def _starts(counts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if counts.dtype.kind != "i" or (counts.size and counts.min() < 0):
        raise ValueError("a count is not valid")
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _parts(values: npt.NDArray[Any], counts: npt.NDArray[Any], first: int, last: int) -> Iterator[list[Any]]:
    """The parts ``first`` to ``last`` of a column, as lists."""
    starts = _starts(counts)
    if starts[-1] != len(values) or last > len(counts):
        raise ValueError(f"{len(values)} values for {len(counts)} counts of {starts[-1]}")
    at = int(starts[first])
    numbers = values[at : starts[last]].tolist()
    for start, stop in itertools.pairwise((starts[first : last + 1] - at).tolist()):
        yield numbers[start:stop]


# --- compression


@cache
def _zstandard() -> Any:
    """The module zstandard; ``None`` where it is not installed."""
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        return None


def _compressor() -> tuple[str, Callable[[bytes], bytes]]:
    """The name of the best codec that is installed, and its function."""
    if (module := _zstandard()) is not None:
        compress: Callable[[bytes], bytes] = module.ZstdCompressor(level=_ZSTD_LEVEL).compress
        return "zstd", compress
    return "zlib", lambda data: zlib.compress(data, _ZLIB_LEVEL)


def _decompressor(codec: str) -> Decompress:
    """Decompress data to at most so many bytes."""
    if codec == "zlib":
        return _zlib_decompress
    if codec != "zstd":
        raise ResultsError(f"episodes are compressed with {codec!r}: upgrade rollgym to read them.")
    module = _zstandard()
    if module is None:
        raise ResultsError(
            "Episodes of this run are compressed with zstd: pip install zstandard to read them."
        )

    def decompress(data: bytes, size: int) -> bytes:
        try:
            if size == 0:
                return b""
            if module.frame_content_size(data) != size:
                raise ValueError("the compressed size does not match")
            result: bytes = module.ZstdDecompressor().decompress(data, max_output_size=size)
            return result
        except module.ZstdError as error:
            raise ValueError(str(error)) from None

    return decompress


def _zlib_decompress(data: bytes, size: int) -> bytes:
    decoder = zlib.decompressobj()
    try:
        return decoder.decompress(data, size) if size else b""
    except zlib.error as error:
        raise ValueError(str(error)) from None
