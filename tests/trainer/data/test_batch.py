"""Batches: the order of tokens, and partitions that lose, repeat or add nothing."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.core.errors import UsageError
from rollgym.trainer.data.batch import balanced, make_batch, micro_batches, mini_batches
from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence

few = settings(max_examples=60, deadline=None)
LENGTHS = st.lists(st.integers(1, 40), max_size=25)


def episode(*counts: int) -> TokenEpisode:
    """Sequences with these numbers of action tokens, after two prompt tokens."""
    rows = tuple(TokenSequence(np.arange(2 + n), np.arange(2, 2 + n)) for n in counts)
    behavior = -np.arange(1.0, 1 + sum(counts))
    return TokenEpisode("e", rows, behavior, np.array(counts, dtype=np.int64))


def test_arrays_are_ordered_by_episode_and_sequence() -> None:
    batch = make_batch([episode(2, 1), episode(), episode(3)], advantages=[[1, 2, 3], [], [4, 5, 6]])
    assert batch.num_tokens == 6
    assert len(batch.sequences) == 3
    assert batch.episode_of.tolist() == [0, 0, 2]
    assert batch.starts.tolist() == [0, 2, 3, 6]
    assert batch.lengths == [[2, 1], [], [3]]
    assert batch.arrays["behavior"].tolist() == [-1, -2, -3, -1, -2, -3]
    assert batch.token_indices([2, 0]).tolist() == [3, 4, 5, 0, 1]
    assert batch.token_indices([]).tolist() == []
    assert batch.sequences_of([2, 1]) == [2]
    assert batch.sequences_of([0, 2]) == [0, 1, 2]


def test_with_arrays_does_not_modify_the_batch() -> None:
    batch = make_batch([episode(2)])
    more = batch.with_arrays(advantages=np.ones(2))
    assert set(batch.arrays) == {"behavior"}
    assert set(more.arrays) == {"behavior", "advantages"}
    assert more.episodes == batch.episodes


def test_an_array_of_the_wrong_length_is_refused_by_name() -> None:
    message = r"The array advantages has shape \(3,\), expected \(2,\): one number for each action token"
    with pytest.raises(UsageError, match=message):
        make_batch([episode(2)]).with_arrays(advantages=np.ones(3))


def test_a_batch_without_episodes_is_empty() -> None:
    batch = make_batch([])
    assert (batch.num_tokens, batch.sequences, batch.lengths) == (0, (), [])


@few
@given(lengths=LENGTHS, budget=st.integers(1, 60), padded=st.booleans())
def test_micro_batches_contain_every_sequence_once_within_the_budget(
    lengths: list[int], budget: int, padded: bool
) -> None:
    """Rule 18: nothing is repeated or dropped; only a sequence longer than the budget exceeds it."""
    parts = micro_batches(lengths, budget, padded=padded)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        longest = max(lengths[row] for row in part)
        size = longest * len(part) if padded else sum(lengths[row] for row in part)
        assert size <= budget or len(part) == 1


def test_packed_sequences_are_placed_by_best_fit() -> None:
    assert micro_batches([5, 4, 3, 2, 1], 8, padded=False) == [[0, 2], [1, 3, 4]]
    assert micro_batches([1, 5, 5, 3, 2], 8, padded=False) == [[1, 3], [2, 4, 0]]


@few
@given(lengths=LENGTHS, budget=st.integers(1, 60))
def test_best_fit_is_that_of_a_search_over_all_parts(lengths: list[int], budget: int) -> None:
    parts: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fits = [part for part in range(len(parts)) if room[part] >= lengths[index]]
        if not fits:
            parts.append([])
            room.append(budget)
            fits = [len(parts) - 1]
        best = min(fits, key=lambda part: (room[part], part))
        parts[best].append(index)
        room[best] -= lengths[index]
    assert micro_batches(lengths, budget, padded=False) == parts


def test_padded_sequences_are_grouped_by_length() -> None:
    assert micro_batches([1, 9, 2, 8, 1], 18, padded=True) == [[1, 3], [2, 0, 4]]


def test_micro_batches_are_deterministic() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 200).tolist()
    for padded in (True, False):
        assert micro_batches(lengths, 64, padded=padded) == micro_batches(lengths, 64, padded=padded)


@few
@given(costs=st.lists(st.floats(0, 100), max_size=30), shares=st.integers(1, 6))
def test_shares_are_balanced_and_contain_everything_once(costs: Sequence[float], shares: int) -> None:
    parts = balanced(costs, shares)
    assert len(parts) == shares
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    totals = [sum(costs[i] for i in part) for part in parts]
    assert max(totals) - min(totals) <= max(costs, default=0.0) + 1e-9


@few
@given(count=st.integers(0, 40), parts=st.integers(1, 12), seed=st.integers(0, 9))
def test_mini_batches_contain_every_episode_exactly_once(count: int, parts: int, seed: int) -> None:
    """Rule 18."""
    made = mini_batches(count, parts, np.random.default_rng(seed))
    assert sorted(i for part in made for i in part) == list(range(count))
    assert len(made) == min(parts, max(count, 1))
    sizes = [len(part) for part in made]
    assert max(sizes) - min(sizes) <= 1
    # The order within a part is that of the batch: weights are laid out in it.
    assert all(part == sorted(part) for part in made)
    assert made == mini_batches(count, parts, np.random.default_rng(seed))


def test_mini_batches_are_random() -> None:
    dealt = {str(mini_batches(12, 3, np.random.default_rng(seed))) for seed in range(5)}
    assert len(dealt) == 5


def test_zero_mini_batches_are_refused() -> None:
    with pytest.raises(UsageError, match="mini_batches must be at least 1, not 0"):
        mini_batches(3, 0, np.random.default_rng(0))
