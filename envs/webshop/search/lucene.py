"""Search that ranks exactly as Lucene does: BM25 with k1 0.9 and b 0.4, as the original shop used it.

An inverted index of plain arrays, memory-mapped, so that it opens at once and processes share it. What Lucene
computes in single precision is computed in single precision here; a document's length is kept in one byte, as
there; equal scores are ordered by the documents' names, or by their numbers where they have none.
"""

from __future__ import annotations

import bisect
import json
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollgym.envs.webshop.search.analysis import tokens

NAME = "lucene-exact"
K1, B = np.float32(0.9), np.float32(0.4)
MAX_CHARACTERS = 10_000
"""Characters of a query that are read at all."""
MAX_TERMS = 1024
"""Different terms of a query that count; Lucene refuses a query of more."""
ARRAYS = ("terms", "term_ends", "posting_ends", "documents", "codes", "weights", "ranks")

_SPARSE = 64
"""Below one touched document in this many, no dense score array is built."""
_DENSE = 4
"""A term in more than one of this many documents is added as a dense array, which is faster."""
_BLOCK = 256
_EXACT = 24
"""Lengths below this one are kept exactly (codes left over beside 4 significant bits)."""


def encode_length(length: int) -> int:
    """A document's length as one byte: exact below 40, then about 4 significant bits."""
    if length < _EXACT:
        return length
    remainder = length - _EXACT
    shift = max(remainder.bit_length() - 4, 0)
    digits = remainder >> shift
    return _EXACT + (digits if remainder < 8 else (digits & 7) | (shift + 1) << 3)


def decode_length(byte: int) -> int:
    """Return the length of a byte: the least that is encoded as it."""
    if byte < _EXACT:
        return byte
    digits, shift = (byte - _EXACT) & 7, ((byte - _EXACT) >> 3) - 1
    return _EXACT + (digits if shift < 0 else (digits | 8) << shift)


def inverse_norms(average: float) -> NDArray[np.float32]:
    """Return the factor of a term's count for each length byte."""
    lengths = np.array([decode_length(byte) for byte in range(256)], dtype=np.float32)
    unit = np.float32(1)
    return np.asarray(unit / (K1 * ((unit - B) + B * lengths / np.float32(average))), dtype=np.float32)


def inverse_frequency(containing: int, total: int) -> np.float32:
    """Return the inverse document frequency of a term in ``containing`` of ``total`` documents."""
    return np.float32(math.log(1 + (total - containing + 0.5) / (containing + 0.5)))


Part: TypeAlias = tuple[NDArray[Any], NDArray[np.float32]]
"""Document numbers, ascending, and a score for each."""


class _Terms(Sequence[bytes]):
    """The sorted terms, read lazily from the mapped file."""

    def __init__(self, blob: NDArray[np.uint8], ends: NDArray[np.uint64]) -> None:
        # Views give plain integers and bytes, much faster than elements of an array.
        self._blob, self._ends = blob.data, ends.data

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        return bytes(self._blob[self._ends[index] : self._ends[index + 1]])


class LuceneIndex:
    """An opened index; any number of environments and threads may share it."""

    name = NAME

    def __init__(self, folder: Path, *, cache: int = 256) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        self.count: int = meta["documents"]
        load = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        self._terms = _Terms(load["terms"], load["term_ends"])
        # A plain array over the same mapped memory: each slice of a memmap would cost microseconds.
        self._documents, self._codes = np.asarray(load["documents"]), np.asarray(load["codes"])
        self._ends = load["posting_ends"].data
        self._ranks = np.asarray(load["ranks"]) if len(load["ranks"]) else None
        weights = np.asarray(load["weights"])
        average = np.float32(max(meta["tokens"], 1) / max(meta["nonempty"], 1))
        frequencies = (weights >> 8).astype(np.float32)
        self._factors = np.float32(1) + frequencies * inverse_norms(float(average))[weights & 255]
        # In a document of endless length a term may add nothing; then a sum of 0 does not mean "not found".
        self._positive = bool((self._factors > 1).all())
        self._nonempty: int = meta["nonempty"]
        self._find = lru_cache(maxsize=cache)(self._search)

    def find(self, words: str, count: int = 50) -> list[tuple[int, float]]:
        """Document numbers with their scores, best first; any text is a bag of words."""
        return list(self._find(words[:MAX_CHARACTERS], count))

    def _search(self, words: str, count: int) -> tuple[tuple[int, float], ...]:
        term_parts = [self._part(term, times) for term, times in query_terms(words)]
        parts = [part for part in term_parts if part is not None]
        if not parts or count < 1:
            return ()
        numbers, scores = self._sum(parts, count)
        return best(numbers, scores, count, self._ranks)

    def _part(self, term: str, times: int) -> Part | None:
        """Return the documents that contain a term, and its share of each score."""
        key = term.encode()
        index = bisect.bisect_left(self._terms, key)
        if index == len(self._terms) or self._terms[index] != key:
            return None
        start, end = self._ends[index], self._ends[index + 1]
        weight = np.float32(times) * inverse_frequency(end - start, self._nonempty)
        # No code lies outside the table; to clip is just the fastest way to look up.
        if end - start < len(self._factors):
            scores = weight - weight / self._factors.take(self._codes[start:end], mode="clip")
        else:
            scores = (weight - weight / self._factors).take(self._codes[start:end], mode="clip")
        return self._documents[start:end], scores

    def _sum(self, parts: list[Part], count: int) -> Part:
        """The documents that contain any of the terms, ascending, and their scores; at least the best."""
        if len(parts) == 1:
            return parts[0]
        # Lucene adds up in double precision and rounds once; so do both ways here, in the order of the terms.
        if sum(len(numbers) for numbers, _ in parts) * _SPARSE > self.count and self._positive:
            sums = self._dense_sums(parts)
            floor = _floor(sums, count)
            matched = np.flatnonzero(sums >= floor) if floor else np.flatnonzero(sums)
            return matched, sums[matched].astype(np.float32)
        numbers = np.concatenate([numbers for numbers, _ in parts])
        matched, indices = np.unique(numbers, return_inverse=True)
        added = np.concatenate([scores for _, scores in parts])
        return matched, np.bincount(indices, added).astype(np.float32)

    def _dense_sums(self, parts: list[Part]) -> NDArray[np.float64]:
        """The score of every document of the index, 0 where it has none of the terms."""
        sums = np.zeros(self.count)
        for numbers, scores in parts:
            if len(numbers) * _DENSE > self.count:
                spread = np.zeros(self.count, dtype=np.float32)
                spread[numbers] = scores
                sums += spread
            else:
                sums[numbers] += scores
        return sums


def _floor(sums: NDArray[np.float64], count: int) -> float:
    """A score that at least ``count`` documents have, when rounded; 0 if there are too few."""
    blocks = len(sums) // _BLOCK
    if blocks < count:
        return 0.0
    tops = sums[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    return float(np.partition(tops, blocks - count)[blocks - count]) * (1 - 1e-6)


def query_terms(words: str) -> list[tuple[str, int]]:
    """The different terms of a query with their counts, in order of appearance, at most `MAX_TERMS`."""
    return list(Counter(tokens(words)).items())[:MAX_TERMS]


def best(
    numbers: NDArray[Any], scores: NDArray[np.float32], count: int, ranks: NDArray[Any] | None = None
) -> tuple[tuple[int, float], ...]:
    """The ``count`` best, equal scores by ``ranks[number]``, or by number; ``numbers`` ascend."""
    if len(scores) > count:
        threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
        above, tied = np.flatnonzero(scores > threshold), np.flatnonzero(scores == threshold)
        if ranks is not None:
            tied = tied[np.argsort(ranks[numbers[tied]], kind="stable")]
        selected = np.sort(np.concatenate([above, tied[: count - len(above)]]))
        numbers, scores = numbers[selected], scores[selected]
    order = np.lexsort((numbers if ranks is None else ranks[numbers], -scores))
    return tuple(zip(numbers[order].tolist(), scores[order].tolist(), strict=True))
