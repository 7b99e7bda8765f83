"""Writes the index that `rollgym.envs.webshop.search.lucene` reads, in bounded memory.

Documents are taken in until there are ``RUN_TOKENS`` terms; then that run is sorted and put on disk. In the
end the vocabularies of the runs are merged, line by line, and every run's postings go to their final places.
"""

from __future__ import annotations

import heapq
import json
import shutil
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgym.envs.webshop.search.lucene import encode_length

RUN_TOKENS = 4_000_000
MAX_FREQUENCY = (1 << 24) - 1
"""More than this often a term does not count in one document (single precision ends there)."""


@dataclass(slots=True)
class _Run:
    """Some documents in order of their terms; ``ends`` bounds the postings of each term."""

    folder: Path
    ends: NDArray[np.int64]

    def lines(self) -> Iterator[bytes]:
        with (self.folder / "terms").open("rb") as file:
            yield from file

    def load(self, name: str) -> NDArray[Any]:
        return np.asarray(np.load(self.folder / f"{name}.npy"))


class LuceneBuilder:
    """Takes documents as lists of terms, in the order of their numbers, and writes the index."""

    def __init__(self, folder: Path, *, run_tokens: int = RUN_TOKENS) -> None:
        self._folder = folder
        self._run_tokens = run_tokens
        self._work = Path(tempfile.mkdtemp(prefix="runs-", dir=folder))
        self._runs: list[_Run] = []
        self._documents = self._tokens = self._nonempty = 0
        self._start_run()

    def add(self, terms: Sequence[str]) -> None:
        """The next document."""
        numbers = self._numbers
        self._terms.extend([numbers[term] for term in terms])
        self._lengths.append(len(terms))
        self._documents += 1
        self._tokens += len(terms)
        self._nonempty += bool(terms)
        if len(self._terms) >= self._run_tokens:
            self._end_run()

    def finish(self, names: Sequence[str] | None = None) -> None:
        """Merge the runs into the final files; equal scores will be ordered by the documents' ``names``."""
        if self._terms:
            self._end_run()
        self._save("ranks", np.zeros(0, np.uint32) if names is None else _ranks(names))
        try:
            self._merge()
        finally:
            shutil.rmtree(self._work)

    def abandon(self) -> None:
        """Abort; the folder is not an index."""
        shutil.rmtree(self._work, ignore_errors=True)

    def _start_run(self) -> None:
        self._first = self._documents
        self._terms = array("I")
        self._lengths = array("I")
        numbers: defaultdict[str, int] = defaultdict()
        numbers.default_factory = numbers.__len__
        self._numbers = numbers

    def _end_run(self) -> None:
        folder = self._work / str(len(self._runs))
        folder.mkdir()
        words = sorted(word.encode() for word in self._numbers)
        (folder / "terms").write_bytes(b"".join(word + b"\n" for word in words))
        ends = self._write_postings(folder, words)
        self._runs.append(_Run(folder, ends))
        self._start_run()

    def _write_postings(self, folder: Path, words: list[bytes]) -> NDArray[np.int64]:
        rank = np.empty(len(words), dtype=np.uint64)
        rank[[self._numbers[word.decode()] for word in words]] = np.arange(len(words), dtype=np.uint64)
        lengths = np.frombuffer(self._lengths, dtype=np.uint32)
        owners = np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)
        keys = rank[np.frombuffer(self._terms, dtype=np.uint32)] << np.uint64(32) | owners
        keys.sort()
        # Equal keys are one term in one document: where they begin, and how many there are.
        starts = np.flatnonzero(np.diff(keys, prepend=~keys[:1]))
        frequencies = np.minimum(np.diff(starts, append=len(keys)), MAX_FREQUENCY)
        keys = keys[starts]
        local = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        bytes_ = np.array([encode_length(length) for length in self._lengths], dtype=np.uint32)
        np.save(folder / "documents.npy", local + np.uint32(self._first))
        np.save(folder / "weights.npy", frequencies.astype(np.uint32) << np.uint32(8) | bytes_[local])
        counts = np.bincount((keys >> np.uint64(32)).astype(np.int64), minlength=len(words))
        return _bounds(counts)

    def _merge(self) -> None:
        term_indices, ends = self._merge_terms()
        run_weights = [np.unique(run.load("weights")) for run in self._runs]
        weights = np.unique(np.concatenate([np.zeros(0, np.uint32), *run_weights]))
        codes = np.uint16 if len(weights) <= 1 << 16 else np.uint32
        self._save("weights", weights)
        counts = np.zeros(len(ends) - 1, dtype=np.int64)
        for run, indices in zip(self._runs, term_indices, strict=True):
            counts[indices] += np.diff(run.ends)
        bounds = _bounds(counts)
        self._save("posting_ends", bounds.astype(np.uint64))
        documents = self._create("documents", np.uint32, int(bounds[-1]))
        posting_codes = self._create("codes", codes, int(bounds[-1]))
        next_free = bounds[:-1].copy()
        for run, indices in zip(self._runs, term_indices, strict=True):
            sizes = np.diff(run.ends)
            target = np.repeat(next_free[indices] - run.ends[:-1], sizes) + np.arange(run.ends[-1])
            documents[target] = run.load("documents")
            posting_codes[target] = np.searchsorted(weights, run.load("weights"))
            next_free[indices] += sizes
        for mapped in (documents, posting_codes):
            if isinstance(mapped, np.memmap):
                mapped.flush()
        meta = {"documents": self._documents, "tokens": self._tokens, "nonempty": self._nonempty}
        (self._folder / "meta.json").write_text(json.dumps(meta))

    def _merge_terms(self) -> tuple[list[NDArray[np.uint32]], NDArray[np.uint64]]:
        """Write all terms, sorted; for each run the final places of its terms."""
        positions = [array("I") for _ in self._runs]
        ends = array("Q", [0])
        previous = b""
        streams = [zip(run.lines(), repeat(number)) for number, run in enumerate(self._runs)]
        blob = self._work / "terms"
        with blob.open("wb") as file:
            for line, number in heapq.merge(*streams):
                if line != previous:
                    file.write(line[:-1])
                    ends.append(ends[-1] + len(line) - 1)
                    previous = line
                positions[number].append(len(ends) - 2)
        self._save("terms", np.fromfile(blob, dtype=np.uint8))
        self._save("term_ends", np.frombuffer(ends, dtype=np.uint64))
        columns = [np.frombuffer(column, dtype=np.uint32) for column in positions]
        return columns, np.frombuffer(ends, np.uint64)

    def _save(self, name: str, values: NDArray[Any]) -> None:
        np.save(self._folder / f"{name}.npy", values)

    def _create(self, name: str, kind: type[Any], size: int) -> NDArray[Any]:
        """Create an array on disk; an empty one cannot be mapped."""
        path = self._folder / f"{name}.npy"
        if not size:
            np.save(path, np.zeros(0, kind))
            return np.zeros(0, kind)
        return np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(kind), shape=(size,))


def _ranks(names: Sequence[str]) -> NDArray[np.uint32]:
    """The place of each name among all of them, sorted by their bytes."""
    ranks = np.empty(len(names), dtype=np.uint32)
    order = sorted(range(len(names)), key=lambda number: names[number].encode("utf-8", "replace"))
    ranks[order] = np.arange(len(names), dtype=np.uint32)
    return ranks


def _bounds(counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return start offsets from counts, and the end."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
