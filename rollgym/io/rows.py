"""Rows of data files: JSON lines, Parquet, Arrow, and folders that ``datasets.save_to_disk`` wrote.

Rows are read one at a time by index or in order, so a file of any size needs little memory. Nothing is
downloaded, and the package ``datasets`` is not needed.
"""

from __future__ import annotations

import glob
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgym.core.errors import UsageError, one_line
from rollgym.core.files import read_bounded
from rollgym.core.seeding import stable_digest
from rollgym.io.row_files import SUFFIXES, Row, RowFile, cached_array, combined_fingerprint, open_row_file

__all__ = ["Rows", "dataset_splits", "open_rows"]

_STATE, _DICT = "state.json", "dataset_dict.json"
"""Files that ``save_to_disk`` writes for a data set, and for several by split."""


class Rows(Sequence[Row]):
    """Rows of one or several files, in order.

    Example:
        >>> rows = open_rows("gsm8k.jsonl", columns={"prompt": "question", "answer": "answer"})
        >>> len(rows), rows[0]
        (7473, {'prompt': 'Natalia sold clips to ...', 'answer': '... #### 72'})
    """

    def __init__(self, files: Sequence[RowFile], columns: Mapping[str, str] | None) -> None:
        self.columns = None if columns is None else dict(columns)
        """Source column by name; ``None`` for all columns under their own names."""
        self.fingerprint = combined_fingerprint(files)
        """SHA-256 of the content of the files, whatever the columns."""
        self._files = list(files)
        self._ends = list(accumulate(len(file) for file in files))
        self._names = [self._source_names(file) for file in files]
        self._check_columns()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        """Row ``index`` as a dict; a slice gives a list."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number, local = self._locate(index)
        return self._picked(self._files[number].read(local, self._names[number]), lambda: self.place(index))

    def __iter__(self) -> Iterator[Row]:
        """All rows in order, streamed."""
        first = 0
        for file, names in zip(self._files, self._names, strict=True):
            for local, row in enumerate(file.scan(names)):
                yield self._picked(row, lambda index=first + local: self.place(index))  # type: ignore[misc]
            first += len(file)

    def place(self, index: int) -> str:
        """The position of a row for messages: ``FILE:LINE``."""
        number, local = self._locate(index)
        return self._files[number].place(local)

    def derived(self, name: str, make: Callable[[], NDArray[np.uint64]]) -> NDArray[np.uint64]:
        """An array that ``make`` computes from these rows; cached under ``name`` where the files are large.

        ``name`` must change with everything that the array depends on, besides the files and columns.
        """
        columns = None if self.columns is None else sorted(self.columns.items())
        key = stable_digest(name, columns).hex()[:16]
        size = sum(os.path.getsize(file.path) for file in self._files)
        return cached_array(self.fingerprint, f"derived-{key}", size, make)

    def _locate(self, index: int) -> tuple[int, int]:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"row {index} is out of range: there are {len(self)} rows")
        number = bisect_right(self._ends, position)
        return number, position - (self._ends[number - 1] if number else 0)

    def _source_names(self, file: RowFile) -> list[str] | None:
        """The columns to read from a file: whole columns for those that name a field inside one."""
        if self.columns is None or file.names is None:
            return None
        names = []
        for column in self.columns.values():
            source = column if column in file.names else column.split(".", 1)[0]
            if source not in file.names:
                raise UsageError(_missing(str(file.path), column, file.names))
            names.append(source)
        return list(dict.fromkeys(names))

    def _check_columns(self) -> None:
        """Check every row once, so that no training run meets a missing column after hours."""
        if self.columns is None:
            return

        def check() -> NDArray[np.uint64]:
            return np.array([sum(1 for _ in self)], np.uint64)

        nested = any("." in column for column in self.columns.values())
        if nested or any(file.names is None for file in self._files):
            self.derived("columns", check)

    def _picked(self, row: Row, place: Callable[[], str]) -> Row:
        if self.columns is None:
            return row
        return {name: _field(row, column, place) for name, column in self.columns.items()}


def _field(row: Row, column: str, place: Callable[[], str]) -> Any:
    """The value of a column, or of a field inside one (``reward_model.ground_truth``)."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise UsageError(_missing(place(), column, tuple(row)))
        value = value[part]
    return value


def _missing(place: str, column: str, names: Sequence[str]) -> str:
    return f"{place}: there is no column {column!r}; the columns are {', '.join(names) or 'none'}."


def open_rows(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    columns: Mapping[str, str] | None = None,
) -> Rows:
    """Open the rows of a file, of several, or of a folder that ``datasets.save_to_disk`` wrote.

    Args:
        path: A file (JSONL, also with gzip, Parquet or Arrow), a pattern such as ``train-*.parquet``, a list
            of files, or a folder with ``state.json``.
        columns: Name in the rows to name in the file; a dot leads to a field inside a column. Every row must
            have them. Default: all columns, under their own names.

    Raises:
        UsageError: A file cannot be read, a line is not a JSON object, or a column is missing; the message
            says which file and line.

    Example:
        >>> open_rows("data/train-*.parquet", columns={"prompt": "question"})[0]
        {'prompt': 'How many legs do three spiders have?'}
    """
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    files = [open_row_file(file) for name in paths for file in _files(str(os.fspath(name)))]
    if not files:
        raise UsageError("No data file given: expected at least one.")
    return Rows(files, columns)


def dataset_splits(path: str | os.PathLike[str]) -> dict[str, Path]:
    """The folder of each split of a ``DatasetDict`` on disk; empty for any other file or folder."""
    folder = Path(path)
    if not (folder / _DICT).is_file():
        return {}
    names = _read_state(folder / _DICT, folder).get("splits")
    if not isinstance(names, list) or not names or not all(_is_plain(name) for name in names):
        raise UsageError(f"{folder / _DICT} is not valid: expected splits, a list of folder names.")
    return {name: folder / name for name in names}


def _files(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        return _dataset_files(path)
    if path.exists() or not glob.has_magic(name):
        if not path.exists():
            raise UsageError(f"Data file not found: {name}.")
        return [path]
    found = sorted(glob.glob(name))
    if not found:
        raise UsageError(f"No data file matches {name}.")
    return [Path(one) for one in found]


def _dataset_files(folder: Path) -> list[Path]:
    if splits := dataset_splits(folder):
        choices = ", ".join(str(path) for path in splits.values())
        raise UsageError(f"{folder} has several splits: pass the folder of one of them ({choices}).")
    if not (folder / _STATE).is_file():
        raise UsageError(
            f"{folder} is not a data set: expected {_STATE} or {_DICT}, which datasets.save_to_disk writes. "
            f"For files in a folder pass a pattern, such as {folder}/*.parquet (also: {', '.join(SUFFIXES)})."
        )
    state = _read_state(folder / _STATE, folder)
    if state.get("_indices_data_files"):
        raise UsageError(
            f"{folder} was saved by an old version of datasets, with an index of its rows: load it and save "
            "it again with flatten_indices()."
        )
    entries = state.get("_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries or ()]
    if not names or not all(_is_plain(name) for name in names):
        raise UsageError(f"{folder / _STATE} is not valid: expected _data_files, a list of file names.")
    return [folder / str(name) for name in names]


def _is_plain(name: object) -> bool:
    """True for the name of something inside the folder itself."""
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _read_state(path: Path, folder: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_bounded(path, folder=folder))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"Cannot read {path}: {one_line(error)}.") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} does not contain a JSON object.")
    return value
