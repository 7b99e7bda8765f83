"""Shards hold the batch: every row, array and final state is read as it was, and only what was asked for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.trainer.data.batch import Batch, make_batch
from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence
from rollgym.trainer.data.sharding import ShardedBatch, ShardStore, cut, cut_arrays


@st.composite
def batches(draw: Any) -> Batch:
    episodes = []
    for number in range(draw(st.integers(1, 6))):
        rows = []
        for _ in range(draw(st.integers(1, 3))):
            ids = np.array(draw(st.lists(st.integers(0, 2**33), min_size=3, max_size=9)))
            targets = np.array([7, 8]) if draw(st.booleans()) else None
            rows.append(TokenSequence(ids, np.array([1, 2]), targets))
        finals = np.array(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
        tokens = 2 * len(rows)
        behavior = draw(st.lists(st.floats(-9, 0), min_size=tokens, max_size=tokens))
        final_ids = finals if draw(st.booleans()) else None
        name, turns = str(number), np.array([tokens])
        episodes.append(TokenEpisode(name, tuple(rows), np.array(behavior), turns, final_ids))
    batch = make_batch(episodes)
    size = batch.num_tokens
    advantages = draw(st.lists(st.sampled_from([0.0, 0.5, 1e-60]), min_size=size, max_size=size))
    more = {"trained": (np.arange(batch.num_tokens) % 3 > 0).astype(float)} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        more["old"] = batch.arrays["behavior"]
    return batch.with_arrays(advantages=np.array(advantages), **more)


@settings(max_examples=50, deadline=None)
@given(batch=batches(), ranks=st.integers(1, 4), padded=st.booleans(), data=st.data())
def test_a_sharded_batch_is_the_batch(batch: Batch, ranks: int, padded: bool, data: st.DataObject) -> None:
    outline, shards = cut(batch, ranks, room=20, padded=padded)
    shape, arrays = cut_arrays(batch, outline)
    seen: list[int] = []

    def fetch(numbers: Sequence[int]) -> list[Any]:
        seen.extend(numbers)
        return [shards[number] for number in numbers]

    def fetch_arrays(numbers: Sequence[int]) -> list[Any]:
        return [arrays[number] for number in numbers]

    sharded = ShardedBatch(outline, ShardStore(fetch), shape=shape, fetch_arrays=fetch_arrays)
    rows = data.draw(st.lists(st.sampled_from(range(len(batch.sequences))), unique=True))
    sharded.fetch(rows)
    assert set(seen) == {int(outline.shard_of_row[row]) for row in rows}
    for row in rows:
        one, other = sharded.sequences[row], batch.sequences[row]
        assert np.array_equal(one.ids, other.ids)
        assert one.ids.dtype == other.ids.dtype
        assert np.array_equal(one.action_positions, other.action_positions)
        assert np.array_equal(one.predicted, other.predicted)
        at = batch.token_indices([row])
        for name, array in batch.arrays.items():
            assert np.array_equal(sharded.arrays[name][at], array[at])
    assert len(seen) == len(set(seen)), "nothing is fetched twice"
    assert ("old" in batch.arrays) == (sharded.arrays.get("old") is sharded.arrays["behavior"])
    assert sharded.final_lengths == batch.final_lengths
    assert np.array_equal(sharded.trained_tokens, batch.trained_tokens)
    assert np.array_equal(sharded.rows_with_advantages, batch.rows_with_advantages)
    assert (sharded.num_tokens, len(sharded.sequences)) == (batch.num_tokens, len(batch.sequences))
    for number, episode in enumerate(batch.episodes):
        final = sharded.episodes[number].final_ids
        assert (final is None) == (episode.final_ids is None)
        assert final is None or np.array_equal(final, episode.final_ids)
