"""Batches in shards: ranks read their own rows, and the weights are those of the whole batch, bit for bit."""

from typing import Any

import numpy as np
import pytest
from rank_cases import Ranks


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    "given",
    [
        {"critic": "shared", "kl_coef": 0.1, "old_logprobs": "recompute", "mini_batches": 2, "epochs": 2},
        {"old_logprobs": "rollout"},
    ],
    ids=["recomputed", "one pass"],
)
def test_ranks_that_read_their_shards_train_the_same_bit_for_bit(
    pair: Ranks, strategy: str, given: dict[str, Any]
) -> None:
    pair("make", "whole", strategy, **given)
    pair("make", "sharded", strategy, **given)
    pair("train", "whole", range(3))
    shares = pair.try_all("train_sharded", "sharded", range(3), 256)
    whole, sharded = (pair("weights", key)[0] for key in ("whole", "sharded"))
    assert whole.keys() == sharded.keys()
    assert all(np.array_equal(whole[name], sharded[name]) for name in whole)
    if "critic" not in given:  # one pass: what a rank fetches, no other does
        assert np.array(shares).sum(axis=0) == pytest.approx([1.0] * 3, abs=0.35)
        assert np.array(shares).max() < 0.8
    pair("drop", "whole", "sharded")
