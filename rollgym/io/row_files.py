"""Files of rows with random access in bounded memory: JSON lines, Arrow and Parquet.

A file is read by position (``pread``), so threads and forked processes can share an open one. The positions
of its rows are indexed once. Formats without positions (Parquet, gzip) are converted once. Indices and
conversions of large files are kept in the cache folder, under the hash of the file's content.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollgym.core.errors import MissingExtra, UsageError, boundary, os_reason
from rollgym.core.files import open_inside, replacing
from rollgym.core.seeding import stable_digest
from rollgym.io.atomic import cache_root

MAX_LINE_BYTES = 64_000_000
"""Maximum length of a line of JSON."""
MAX_GZIP_BYTES = 100_000_000_000
"""Maximum size of the content of a gzip file."""
SMALL_BYTES = 16_000_000
"""Indices and conversions of files up to this size stay in memory; those of larger files go to the cache."""
_FORMAT = 1
"""Version of the files in the cache: raise it when their content changes."""
_CHUNK = 1 << 20
_BATCH_ROWS = 256
"""Rows of a converted Parquet file that are decoded together."""
_MAX_PART_BYTES = 256_000_000
"""Maximum size of an Arrow record batch."""
SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz", ".parquet", ".arrow")

Row = dict[str, Any]


class RowFile(Protocol):
    """One file of rows."""

    path: Path
    fingerprint: str
    """SHA-256 of the file's content."""
    names: tuple[str, ...] | None
    """Columns, where the format lists them."""

    def __len__(self) -> int: ...

    def read(self, index: int, names: Sequence[str] | None) -> Row:
        """Row ``index``, with these columns or all."""

    def scan(self, names: Sequence[str] | None) -> Iterator[Row]:
        """All rows in order, a few in memory at once."""

    def place(self, index: int) -> str:
        """The position of a row for messages: ``FILE:LINE``."""


def open_row_file(path: Path) -> RowFile:
    """Open a file of rows by its suffix: JSON lines (``.gz`` too), Parquet or Arrow.

    Raises:
        UsageError: It cannot be read, or a line is not a JSON object.
    """
    name = path.name.lower()
    if not name.endswith(SUFFIXES):
        raise UsageError(f"{path} has an unknown format: expected a file that ends in {', '.join(SUFFIXES)}.")
    try:
        source = _Source.open(path)
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {os_reason(error)}.") from None
    if not source.size:
        raise UsageError(f"{path} is empty: expected at least one row.")
    if name.endswith(".parquet"):
        return ArrowFile(path, source.fingerprint, _converted(source, "rows.arrow", _parquet_to_arrow))
    if name.endswith(".arrow"):
        return ArrowFile(path, source.fingerprint, source)
    if name.endswith(".gz"):
        return JsonLines(path, source.fingerprint, _converted(source, "rows.jsonl", _unzip))
    return JsonLines(path, source.fingerprint, source)


class JsonLines:
    """A JSONL file, with an index of the position of each line that is not blank."""

    names: tuple[str, ...] | None = None

    def __init__(self, path: Path, fingerprint: str, source: _Source) -> None:
        self.path, self.fingerprint, self._source = path, fingerprint, source
        self._starts = cached_array(fingerprint, "lines", source.size, self._index)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, index: int, names: Sequence[str] | None) -> Row:
        """Row ``index``; ``names`` is not used, because a line is decoded as a whole."""
        start = int(self._starts[index])
        end = int(self._starts[index + 1]) if index + 1 < len(self) else self._source.size
        return self._decode(self._source.read(start, end - start), lambda: self.place(index))

    def scan(self, names: Sequence[str] | None) -> Iterator[Row]:
        """All rows in order."""
        for number, _, line in self._lines():
            yield self._decode(line, lambda number=number: f"{self.path}:{number}")  # type: ignore[misc]

    def place(self, index: int) -> str:
        """``FILE:LINE``; counts the lines before it, because blank lines are not rows."""
        start, lines = int(self._starts[index]), 1
        for position in range(0, start, _CHUNK):
            lines += self._source.read(position, min(_CHUNK, start - position)).count(b"\n")
        return f"{self.path}:{lines}"

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(line number, position, line) of each line that is not blank."""
        position = 0
        for number, line in enumerate(read_lines(self._source.file()), 1):
            if line.strip():
                yield number, position, line
            position += len(line)

    def _index(self) -> NDArray[np.uint64]:
        starts = array("Q")
        for number, position, line in self._lines():
            self._decode(line, lambda number=number: f"{self.path}:{number}")  # type: ignore[misc]
            starts.append(position)
        if not starts:
            raise UsageError(f"{self.path} is empty: expected at least one row.")
        return np.frombuffer(starts, np.uint64)

    @staticmethod
    def _decode(line: bytes, place: Callable[[], str]) -> Row:
        if len(line) > MAX_LINE_BYTES:
            raise UsageError(f"{place()}: the line is longer than {MAX_LINE_BYTES:,} bytes.")
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise UsageError(f"{place()}: not valid JSON ({error}); expected one object per line.") from None
        if not isinstance(value, dict):
            kind = "list" if isinstance(value, list) else type(value).__name__
            raise UsageError(f"{place()}: expected a JSON object with named columns, not a {kind}.")
        return value


class ArrowFile:
    """An Arrow file (stream or file format), with an index of its record batches."""

    def __init__(self, path: Path, fingerprint: str, source: _Source) -> None:
        self.path, self.fingerprint, self._source = path, fingerprint, source
        arrow = _arrow(path)
        with boundary(UsageError, f"Cannot read {path}"):
            if source.read(0, 6) == b"ARROW1":
                source = self._source = _converted(source, "rows.arrow", _file_to_stream)
            self._schema = arrow.ipc.open_stream(source.file()).schema
        if any(arrow.types.is_dictionary(field.type) for field in self._schema):
            raise UsageError(f"{path}: dictionary-encoded columns are not supported: write plain ones.")
        self.names: tuple[str, ...] | None = tuple(self._schema.names)
        index = cached_array(fingerprint, "batches", source.size, self._index).reshape(-1, 3)
        self._index_rows = index
        self._ends = np.cumsum(index[:, 2], dtype=np.uint64)
        self._last: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, index: int, names: Sequence[str] | None) -> Row:
        """Row ``index``; reads its record batch."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        last = self._last
        if last is None or last[0] != number:
            last = self._last = (number, self._batch(number))
        batch = last[1]
        first = int(self._ends[number]) - batch.num_rows
        return self._selected(batch.slice(index - first, 1), names)[0]

    def scan(self, names: Sequence[str] | None) -> Iterator[Row]:
        """All rows in order, one record batch at a time."""
        for number in range(len(self._ends)):
            batch = self._batch(number)
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield from self._selected(batch.slice(start, _BATCH_ROWS), names)

    def place(self, index: int) -> str:
        """``FILE:ROW``, counted from 1."""
        return f"{self.path}:{index + 1}"

    def _selected(self, batch: Any, names: Sequence[str] | None) -> list[Row]:
        rows: list[Row] = (batch if names is None else batch.select(list(names))).to_pylist()
        return rows

    def _batch(self, number: int) -> Any:
        arrow = _arrow(self.path)
        start, size, _ = map(int, self._index_rows[number])
        with boundary(UsageError, f"Cannot read {self.path}"):
            message = arrow.ipc.read_message(arrow.py_buffer(self._source.read(start, size)))
            return arrow.ipc.read_record_batch(message, self._schema)

    def _index(self) -> NDArray[np.uint64]:
        """Position, size and number of rows of each record batch."""
        arrow = _arrow(self.path)
        entries = array("Q")
        file = arrow.PythonFile(self._source.file(), mode="r")
        with boundary(UsageError, f"Cannot read {self.path}"):
            arrow.ipc.read_message(file)  # the schema
            while True:
                start = file.tell()
                try:
                    message = arrow.ipc.read_message(file)
                except EOFError:
                    break
                size = file.tell() - start
                if size > _MAX_PART_BYTES:
                    raise UsageError(
                        f"{self.path} has a record batch of {size:,} bytes, more than {_MAX_PART_BYTES:,}: "
                        "write it with fewer rows per batch."
                    )
                batch = arrow.ipc.read_record_batch(message, self._schema)
                if batch.num_rows:
                    entries.extend((start, size, batch.num_rows))
        if not entries:
            raise UsageError(f"{self.path} is empty: expected at least one row.")
        return np.frombuffer(entries, np.uint64)


def read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Lines of a file with their ends; one that is too long comes cut off, one byte longer than allowed.

    The rest of such a line is skipped, so positions are not exact after it.
    """
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        if len(line) > MAX_LINE_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)


def parquet_batches(
    path: Path,
    names: Sequence[str] | None = None,
    optional: Sequence[str] = (),
    rows: int = _BATCH_ROWS,
) -> Iterator[Any]:
    """Record batches of a Parquet file, with these columns (and optional ones that it has) or all.

    Raises:
        UsageError: The file cannot be read, has no such column, or pyarrow is not installed.
    """
    parquet = _arrow(path, "parquet")
    with boundary(UsageError, f"Cannot read {path}"):
        table = parquet.ParquetFile(path)
        known = list(table.schema_arrow.names)
        for name in names or ():
            if name not in known:
                raise UsageError(f"{path} has no column {name}; its columns are {', '.join(known)}.")
        chosen = None if names is None else [*names, *(name for name in optional if name in known)]
        yield from table.iter_batches(batch_size=rows, columns=chosen)


def cached_array(
    fingerprint: str, name: str, size: int, make: Callable[[], NDArray[np.uint64]]
) -> NDArray[np.uint64]:
    """An array derived from content with this hash and size: in the cache if large, so processes share it."""
    if size <= SMALL_BYTES:
        return make()
    path = _cache_folder(fingerprint) / f"{name}.npy"
    with suppress(OSError, ValueError):
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    values = make()

    def save(file: IO[bytes]) -> None:
        np.save(file, values, allow_pickle=False)

    _write_cached(path, save)
    return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


class _Source:
    """Bytes at positions: of an open file, or in memory."""

    def __init__(self, content: int | bytes, size: int, fingerprint: str, path: Path) -> None:
        self.size, self.fingerprint, self.path = size, fingerprint, path
        self._content = content
        if isinstance(content, int):
            weakref.finalize(self, os.close, content)

    @classmethod
    def open(cls, path: Path) -> _Source:
        """Open a regular file and hash its content."""
        with open_inside(path) as file:
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
            return cls(os.dup(file.fileno()), file.tell(), digest.hexdigest(), path)

    def read(self, start: int, size: int) -> bytes:
        """The bytes from ``start``; fewer where the file is shorter now than when it was opened."""
        if isinstance(self._content, bytes):
            return self._content[start : start + size]
        size = min(size, self.size - start)
        data = os.pread(self._content, size, start)
        while len(data) < size:  # the kernel reads at most 2 GB at once
            more = os.pread(self._content, size - len(data), start + len(data))
            if not more:
                raise UsageError(f"{self.path} became shorter while it was in use: start again.")
            data += more
        return data

    def file(self) -> IO[bytes]:
        """A file object with its own position."""
        if isinstance(self._content, bytes):
            return io.BytesIO(self._content)
        return io.BufferedReader(_PositionedFile(self), _CHUNK)


class _PositionedFile(io.RawIOBase):
    """Sequential reads of a source."""

    def __init__(self, source: _Source) -> None:
        self._source, self._position = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), max(self._source.size - self._position, 0))
        data = self._source.read(self._position, size)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _cache_folder(fingerprint: str) -> Path:
    return cache_root() / "rows" / f"{fingerprint[:32]}-{_FORMAT}"


def _write_cached(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file of the cache; two processes that do so at once write the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            write(file)
    except OSError as error:
        raise UsageError(
            f"Cannot write {path}: {os_reason(error)}. Set ROLLGYM_CACHE to a writable folder."
        ) from None


def _converted(source: _Source, name: str, convert: Callable[[_Source, IO[bytes]], None]) -> _Source:
    """The source in a format with positions: in memory if small, else in the cache."""
    if source.size <= SMALL_BYTES // 8:  # compressed, mostly
        target = io.BytesIO()
        convert(source, target)
        content = target.getvalue()
        return _Source(content, len(content), source.fingerprint, source.path)
    path = _cache_folder(source.fingerprint) / name
    if not path.is_file():
        _write_cached(path, lambda file: convert(source, file))
    with open_inside(path) as file:
        return _Source(os.dup(file.fileno()), os.fstat(file.fileno()).st_size, source.fingerprint, path)


def _unzip(source: _Source, target: IO[bytes]) -> None:
    file, written = source.file(), 0
    member = zlib.decompressobj(wbits=31)
    data = file.read(_CHUNK)
    try:
        while data:
            content = member.decompress(data, _CHUNK)
            written += len(content)
            if written > MAX_GZIP_BYTES:
                raise UsageError(f"{source.path} holds more than {MAX_GZIP_BYTES:,} bytes.")
            target.write(content)
            data = member.unconsumed_tail or (b"" if member.eof else file.read(_CHUNK))
            if member.eof:  # perhaps another member follows
                data = member.unused_data.lstrip(b"\0") or file.read(_CHUNK).lstrip(b"\0")
                if data:
                    member = zlib.decompressobj(wbits=31)
    except zlib.error as error:
        raise UsageError(f"{source.path} is not gzip: {error}.") from None
    if not member.eof:
        raise UsageError(f"{source.path}: the gzip data are cut off.")


def _parquet_to_arrow(source: _Source, target: IO[bytes]) -> None:
    arrow, parquet = _arrow(source.path), _arrow(source.path, "parquet")
    with boundary(UsageError, f"Cannot read {source.path}"):
        table = parquet.ParquetFile(source.file(), read_dictionary=[])
        schema = _plain_schema(arrow, table.schema_arrow)
        with arrow.ipc.new_stream(target, schema) as writer:
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, use_threads=False):
                writer.write_batch(batch.cast(schema) if batch.schema != schema else batch)


def _file_to_stream(source: _Source, target: IO[bytes]) -> None:
    arrow = _arrow(source.path)
    with boundary(UsageError, f"Cannot read {source.path}"):
        reader = arrow.ipc.open_file(source.file())
        schema = _plain_schema(arrow, reader.schema)
        with arrow.ipc.new_stream(target, schema) as writer:
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    writer.write_batch(batch.slice(start, _BATCH_ROWS).cast(schema))


def _plain_schema(arrow: Any, schema: Any) -> Any:
    """The schema with dictionary-encoded columns as plain ones."""
    fields = [
        field.with_type(field.type.value_type) if arrow.types.is_dictionary(field.type) else field
        for field in schema
    ]
    return arrow.schema(fields)


def _arrow(path: Path, submodule: str = "") -> Any:
    name = f"pyarrow.{submodule}" if submodule else "pyarrow"
    try:
        module = importlib.import_module(name)
        if not submodule:
            importlib.import_module("pyarrow.ipc")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("pyarrow"):
            raise
        raise MissingExtra(f"Reading {path}", "parquet") from None
    return module


def combined_fingerprint(files: Sequence[RowFile]) -> str:
    """The hash of the content of several files in this order; that of a single file is its own."""
    if len(files) == 1:
        return files[0].fingerprint
    return stable_digest("rows", *(file.fingerprint for file in files)).hex()
