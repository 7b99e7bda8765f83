"""The difference of two versions of a tensor, as the words of its dtype that changed.

A small optimizer step changes few bfloat16 values, and most of those by one unit in the last place. So a
delta has a byte for the distance from one changed word to the next and a byte for the difference of the two
words as integers: about two bytes for each changed value. Applying a delta restores the new words bit for
bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.unsignedinteger[Any]]
"""Values of a tensor as unsigned integers of their size."""
Indices = npt.NDArray[np.int64]

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Type of a word by bytes."""
_LONG = 255
"""A gap byte that is not the last of its gap."""
_WHOLE = -128
"""A step whose word is in `Delta.words`, because the difference does not fit into a byte."""
_BLOCK = 1 << 18
"""Words compared at once, so that intermediate results stay in the cache."""
_ROW = 1024
"""Words of 8 bytes in a row of `checksum`."""


class Delta(NamedTuple):
    """The words that changed."""

    gaps: npt.NDArray[np.uint8]
    """Unchanged words before each changed one; a gap of 255 or more takes several bytes."""
    steps: npt.NDArray[np.int8]
    """New minus old word."""
    words: Words
    """New words whose step does not fit into a byte."""

    @property
    def nbytes(self) -> int:
        """Bytes of the delta."""
        return sum(array.nbytes for array in self)


def as_words(values: npt.NDArray[Any]) -> Words:
    """Return the words of a contiguous array, without a copy."""
    return values.reshape(-1).view(WORDS[values.itemsize])


def changed(new: Words, old: Words) -> Indices:
    """Return the indices of the words that differ."""
    found = [
        _changed(new[start : start + _BLOCK], old[start : start + _BLOCK]) + start
        for start in range(0, len(new), _BLOCK)
    ]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def _changed(new: Words, old: Words) -> Indices:
    per = 8 // new.itemsize
    even = len(new) - len(new) % per
    # Eight bytes are compared at once: most are equal.
    wide = np.flatnonzero(new[:even].view(np.uint64) != old[:even].view(np.uint64))
    if len(wide) * per * 2 > even:
        return np.flatnonzero(new != old)
    near = np.concatenate([(wide[:, None] * per + np.arange(per)).reshape(-1), np.arange(even, len(new))])
    found: Indices = near[new[near] != old[near]]
    return found


def make_delta(new: Words, old: Words, indices: Indices) -> Delta:
    """Return the delta from ``old`` to ``new``, which differ at ``indices``."""
    gaps = np.diff(indices, prepend=-1) - 1
    more = gaps // _LONG
    encoded = np.full(len(gaps) + int(more.sum()), _LONG, dtype=np.uint8)
    encoded[np.cumsum(more + 1) - 1] = gaps % _LONG
    words = new[indices]
    steps = words.astype(np.int64) - old[indices].astype(np.int64)
    fits = np.abs(steps) < -_WHOLE
    return Delta(encoded, np.where(fits, steps, _WHOLE).astype(np.int8), words[~fits])


def apply_delta(target: Words, delta: Delta) -> None:
    """Change the old words in place into the new ones."""
    gaps, steps, words = delta
    ends = np.flatnonzero(gaps != _LONG)
    if len(ends) != len(steps) or int(np.count_nonzero(steps == _WHOLE)) != len(words):
        raise ValueError("the parts of the delta do not fit together")
    if not len(steps):
        return
    indices = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
    if int(indices[-1]) >= len(target):
        raise ValueError(f"the delta changes a value beyond the last of {len(target)}")
    whole = steps == _WHOLE
    values = target[indices].astype(np.int64) + steps
    values[whole] = words
    target[indices] = values.astype(target.dtype)


def checksum(words: Words) -> int:
    """Return a number of 64 bits that any change of a single word changes, and almost surely any other.

    Sums of rows and columns, weighted by their position, are read at the speed of memory, where a CRC would
    take longer than sending the bytes. It protects against lost, doubled and misplaced updates, not against
    an attacker.
    """
    data = words.view(np.uint8).reshape(-1)
    even = len(data) // 8 * 8
    wide = data[:even].view(np.uint64)
    body = wide[: len(wide) // _ROW * _ROW].reshape(-1, _ROW)
    tail = np.concatenate([wide[body.size :], data[even:].astype(np.uint64)])
    total = np.uint64(len(data))
    for sums in (body.sum(axis=1, dtype=np.uint64), body.sum(axis=0, dtype=np.uint64), tail):
        weights = np.arange(len(sums), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        mixed = (sums * weights).sum(dtype=np.uint64)
        total = _mix(total ^ mixed)
    return int(total)


def _mix(value: np.uint64) -> np.uint64:
    """Spread the bits of a number (the finalizer of SplitMix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
