"""A strategy from outside needs one file and one registration: it trains, saves, and is known to configs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_cases import Ranks, make_any, train_any
from third_party_strategies import AllReduceStrategy
from training import SMALL, merged

from rollgym.config.loader import load
from rollgym.core.errors import UsageError
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.learner.strategies import register_strategy

CASE: dict[str, Any] = {"loss": "ppo", "critic": "shared", "schedule": "cosine", "mini_batches": 2}


def test_ranks_train_and_save_with_a_third_party_strategy(pair: Ranks, tmp_path: Path) -> None:
    pair("import_strategies", "third_party_strategies")
    single = make_any("single", **CASE)
    pair("make", "it", "allreduce", **CASE)
    expected = train_any(single, range(4))
    for mine, whole in zip(pair("train", "it", range(4)), expected, strict=True):
        assert mine == pytest.approx(whole, abs=1e-4, rel=1e-3)
    found, _ = pair("weights", "it")
    for name, tensor in single.weights().tensors.items():
        assert np.abs(found[name] - tensor.numpy()).max() < 1e-4
    pair("save", "it", tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "shards.json").read_text())["strategy"] == "allreduce"
    for strategy in ("allreduce", "fsdp2"):
        pair("make", "other", strategy, seed=5, **CASE)
        assert pair("load", "other", tmp_path / "saved") == 8
        loss = pair("train", "other", [7])[0]["policy_loss"]
        single.load(tmp_path / "saved")
        assert loss == pytest.approx(train_any(single, [7])[0]["policy_loss"], abs=1e-4)
    pair("drop")


def test_a_third_party_strategy_of_one_process_trains_and_saves(tmp_path: Path) -> None:
    learner = make_any("frozen_embedding")
    start = {name: tensor.clone() for name, tensor in learner.weights().tensors.items()}
    train_any(learner, range(2))
    after = learner.weights().tensors
    same = {name for name in start if start[name].equal(after[name])}
    assert same == {"model.embed_tokens.weight"}
    learner.save(tmp_path)
    other = make_any("frozen_embedding")
    other.load(tmp_path)
    assert other.steps == 2
    assert train_any(other, [3]) == train_any(learner, [3])


def test_configs_know_registered_strategies() -> None:
    there = {"runtime": "ray", "learner": {"strategy": "allreduce"}}
    assert load(TrainConfig, merged(SMALL, there)).learner.strategy == "allreduce"
    with pytest.raises(UsageError, match="no strategy called 'local'.*Choose one of single, ddp, fsdp2"):
        load(TrainConfig, merged(SMALL, {**there, "learner": {"strategy": "local"}}))
    with pytest.raises(UsageError, match="Strategy 'allreduce' is already registered"):
        register_strategy("allreduce", AllReduceStrategy)
