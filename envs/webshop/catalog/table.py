"""Memory-mapped files: consecutive records, columns of integers, names to numbers.

    NAME.blob        the records, one after another
    NAME.offsets     where each begins, and where the last ends (uint64)
    NAME.names       the keys, sorted, each as wide as the longest
    NAME.numbers     the number of the record that each key belongs to (uint32)

All integers are little-endian.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

UINT32, UINT64 = "<u4", "<u8"


class TableWriter:
    """Writes consecutive records, and their offsets when a ``with`` block ends without an error."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.offsets"
        self._blob = open(folder / f"{name}.blob", "wb")  # noqa: SIM115
        self._offsets = array("Q", [0])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def add(self, record: bytes) -> None:
        """Append a record."""
        self._blob.write(record)
        self._offsets.append(self._offsets[-1] + len(record))

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._blob.close()
        if kind is None:
            write_column(self._path, self._offsets, UINT64)


class Table:
    """The records of a `TableWriter`, mapped into memory."""

    def __init__(self, folder: Path, name: str) -> None:
        self._offsets = read_column(folder / f"{name}.offsets", UINT64)
        self._blob = memoryview(_map(folder / f"{name}.blob"))

    def __len__(self) -> int:
        return max(len(self._offsets) - 1, 0)

    def __getitem__(self, number: int) -> memoryview:
        if not 0 <= number < len(self):
            raise IndexError(f"{number} is not between 0 and {len(self) - 1}")
        return self._blob[int(self._offsets[number]) : int(self._offsets[number + 1])]


class Names:
    """Finds a record's number by its name, in a sorted file."""

    def __init__(self, folder: Path, name: str) -> None:
        self._numbers = read_column(folder / f"{name}.numbers", UINT32)
        data = _map(folder / f"{name}.names")
        width = len(data) // max(len(self._numbers), 1)
        self._names = np.frombuffer(data, dtype=f"S{max(width, 1)}", count=len(self._numbers) if width else 0)

    def find(self, name: str) -> int | None:
        """The number of ``name`` (the last of duplicates), None if unknown."""
        key = name.encode("utf-8", "surrogatepass")
        # Cut to the column's width: for a longer one numpy would copy the whole column into a wider one.
        cut = np.array(key, dtype=self._names.dtype)
        index = int(np.searchsorted(self._names, cut, side="right")) - 1
        return int(self._numbers[index]) if index >= 0 and self._names[index] == key else None


def write_names(folder: Path, name: str, keys: Sequence[bytes]) -> str | None:
    """Write the keys of records 0, 1, 2 and so on; return a duplicate key, if any."""
    width = max(map(len, keys), default=1) or 1
    column = np.array(keys, dtype=f"S{width}")
    order = np.argsort(column, kind="stable")
    column = column[order]
    column.tofile(folder / f"{name}.names")
    order.astype(UINT32).tofile(folder / f"{name}.numbers")
    twice = np.flatnonzero(column[1:] == column[:-1])
    return None if not len(twice) else bytes(column[twice[0]]).decode("utf-8", "replace")


class Numbers(Sequence[int]):
    """A column of integers as a lazy sequence of Python ints."""

    def __init__(self, column: npt.NDArray[Any]) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Numbers: ...
    def __getitem__(self, index: int | slice) -> int | Numbers:
        if isinstance(index, slice):
            return Numbers(self._column[index])
        return int(self._column[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def write_column(path: Path, values: Iterable[int] | npt.NDArray[Any], dtype: str) -> None:
    """Write integers."""
    if not isinstance(values, np.ndarray):
        values = np.asarray(values if isinstance(values, array) else list(values))
    values.astype(dtype, copy=False).tofile(path)


def read_column(path: Path, dtype: str) -> npt.NDArray[Any]:
    """Integers of a file, mapped."""
    return np.frombuffer(_map(path), dtype=dtype)


def _map(path: Path) -> mmap.mmap | bytes:
    with open(path, "rb") as file:
        # The system refuses to map an empty file.
        if not path.stat().st_size:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
