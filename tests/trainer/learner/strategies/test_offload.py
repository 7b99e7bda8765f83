"""Offloading between updates changes no bit of what is trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_cases import Ranks, make_any, train_any

from rollgym.core.errors import UsageError
from rollgym.devices.memory import training_state
from rollgym.devices.models import read_config
from rollgym.devices.types import TrainMesh

rare = [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero1")]
every = pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3", *rare])
CASE: dict[str, Any] = {"loss": "ppo", "critic": "separate", "kl_coef": 0.1, "weight_decay": 0.01}


def test_moving_changes_nothing_but_where_things_are(tmp_path: Path) -> None:
    plain, moved = (make_any("single", **CASE) for _ in range(2))
    for seed in range(3):
        assert train_any(moved, [seed]) == train_any(plain, [seed])
        held = moved.held()
        assert held["optimizer"] == 2 * sum(p.nbytes for p in moved.modules.trained().values())
        assert moved.offload(["optimizer"]) == {"optimizer": held["optimizer"]}
        assert moved.held() == {"optimizer": 0, "weights": held["weights"]}
        assert moved.offload() == {"weights": held["weights"]}, "only what has not left"
        assert moved.held() == {"optimizer": 0, "weights": 0}
        assert all(parameter.grad is None for parameter in moved.model.parameters())
        moved.save(tmp_path)
        assert moved.offloaded == ("optimizer", "weights"), "it is saved from where it is"
        if seed == 1:
            assert moved.reload() == held  # else the next update does so
            assert moved.held() == held
    again = make_any("single", **CASE)
    again.load(tmp_path)
    moved.load(tmp_path)
    assert train_any(again, [7]) == train_any(moved, [7]) == train_any(plain, [7])
    with pytest.raises(UsageError, match="no part gradients"):
        plain.offload(["gradients"])


@pytest.mark.parametrize(
    ("strategy", "sharding"),
    [("ddp", "none"), ("zero1", "optimizer"), ("zero2", "gradients"), ("fsdp2", "weights")],
)
def test_ranks_hold_what_is_planned_for_them(pair: Ranks, strategy: str, sharding: Any) -> None:
    """The planner's bytes are those of the learners, but for padding to whole shares."""
    pair("make", "it", strategy, dtype="bfloat16")
    pair("train", "it", [0])
    (held, _) = pair.try_all("held", "it")
    shape = read_config(make_any("single").model.config.to_dict())
    planned = training_state(shape, TrainMesh(shard=2), sharding)
    assert held["optimizer"] == pytest.approx(planned["optimizer"], rel=0.01)
    assert planned["weights"] == pytest.approx(held["weights"], rel=0.01)
    pair("drop", "it")


@every
def test_ranks_that_offload_train_the_same(pair: Ranks, strategy: str, tmp_path: Path) -> None:
    pair("make", "plain", strategy, **CASE)
    pair("make", "it", strategy, **CASE)
    expected = pair("train", "plain", range(3))
    assert pair("train_with_offload", "it", range(3), tmp_path) == expected
    found, last = pair("weights", "it")[0], pair("weights", "plain")[0]
    assert all(np.array_equal(found[name], last[name]) for name in last)
    pair("make", "again", strategy, **CASE)
    pair("load", "again", tmp_path)
    assert pair("train", "again", [5]) == pair("train", "plain", [5]), "saved while it was away"
    pair("drop")
