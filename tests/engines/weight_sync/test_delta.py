"""Deltas restore the new words bit for bit, and checksums notice what does not."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.engines.weight_sync.delta import (
    Delta,
    Words,
    apply_delta,
    as_words,
    changed,
    checksum,
    make_delta,
)

LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([1023, 1024, 8193, 300_001]))
FRACTIONS = st.sampled_from([0.0, 0.0001, 0.01, 0.2, 1.0])


def versions(seed: int, length: int, fraction: float, dtype: Any) -> tuple[Words, Words]:
    """Two versions of words: steps are small, large, or any word."""
    rng = np.random.default_rng(seed)
    top = int(np.iinfo(dtype).max)
    old = rng.integers(0, top, length, dtype=dtype, endpoint=True)
    where = rng.random(length) < fraction
    steps = rng.choice([-200, -128, -127, -1, 1, 127, 128, 3000], length)
    near = np.clip(old.astype(np.int64) + steps, 0, top).astype(dtype)
    far = rng.integers(0, top, length, dtype=dtype, endpoint=True)
    return np.where(where, np.where(rng.random(length) < 0.9, near, far), old), old


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), LENGTHS, FRACTIONS, st.sampled_from([np.uint16, np.uint32]))
def test_a_delta_restores_the_new_words(seed: int, length: int, fraction: float, dtype: Any) -> None:
    new, old = versions(seed, length, fraction, dtype)
    indices = changed(new, old)
    assert np.array_equal(indices, np.flatnonzero(new != old))
    target = old.copy()
    apply_delta(target, make_delta(new, old, indices))
    assert np.array_equal(target, new)
    assert checksum(target) == checksum(new)
    assert (checksum(old) == checksum(new)) == (not len(indices))


def test_a_small_step_takes_about_two_bytes_per_changed_value() -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(1000, 60_000, 1_000_000, dtype=np.uint16)
    new = old + (rng.random(len(old)) < 0.01) * np.uint16(1)
    indices = changed(new, old)
    assert make_delta(new, old, indices).nbytes < 2.2 * len(indices) < 0.012 * old.nbytes


def test_special_values_keep_their_bits() -> None:
    old = np.array([0.0, 1.0, np.inf, np.nan, -0.0, 1e-45], dtype=np.float32)
    new = np.array([-0.0, np.nan, -np.inf, 1.0, 0.0, 0.0], dtype=np.float32)
    target = as_words(old.copy())
    apply_delta(target, make_delta(as_words(new), target, changed(as_words(new), target)))
    assert target.tobytes() == new.tobytes()


@pytest.mark.parametrize("length", [1, 9, 1024, 50_000])
def test_a_checksum_notices_what_happens_to_updates(length: int) -> None:
    rng = np.random.default_rng(length)
    words = rng.integers(0, 2**16, length, dtype=np.uint16)
    seen = {checksum(words)}
    for at in {0, length // 2, length - 1}:
        for bit in (0, 15):
            other = words.copy()
            other[at] ^= 1 << bit
            seen.add(checksum(other))
    assert len(seen) == 1 + 2 * len({0, length // 2, length - 1})
    if length > 8:
        assert checksum(np.roll(words, 1)) not in seen
        assert checksum(words[::-1].copy()) not in seen
        assert checksum(words[:-1]) not in seen
        swapped = words.copy()
        swapped[[0, 8]] = swapped[[8, 0]]
        assert checksum(swapped) not in seen


def test_a_delta_that_does_not_fit_is_an_error() -> None:
    target = np.zeros(3, dtype=np.uint16)
    with pytest.raises(ValueError, match="beyond the last of 3"):
        apply_delta(target, Delta(np.array([3], np.uint8), np.array([1], np.int8), target[:0]))
    with pytest.raises(ValueError, match="do not fit together"):
        apply_delta(target, Delta(np.array([1], np.uint8), np.array([-128], np.int8), target[:0]))
    assert not target.any()
