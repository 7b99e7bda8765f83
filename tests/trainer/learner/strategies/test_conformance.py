"""Conformance of strategies: losses and weights are those of the single-process learner."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_cases import Ranks, imitate_any, make_any, numbers_any, train_any

STRATEGIES = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
every = pytest.mark.parametrize("strategy", STRATEGIES)
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "grpo", "kl_coef": 0.1, "schedule": "cosine", "weight_decay": 0.01},
    "ppo, a value head": {"loss": "ppo", "critic": "shared", "critic_rate": 3e-3, "epochs": 2},
    "ppo, a separate critic": {"loss": "ppo", "critic": "separate", "mini_batches": 2},
}
_local: dict[str, Any] = {}


def of_local(case: str, given: dict[str, Any], steps: int) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Metrics and weights of the single strategy, computed once."""
    key = f"{case} {steps}"
    if key not in _local:
        learner = make_any("single", **given)
        metrics = train_any(learner, range(steps))
        _local[key] = metrics, {n: t.numpy().copy() for n, t in learner.weights().tensors.items()}
    found: tuple[list[dict[str, float]], dict[str, Any]] = _local[key]
    return found


def compare(pair: Ranks, strategy: str, case: str, given: dict[str, Any], steps: int) -> None:
    expected, last = of_local(case, {k: v for k, v in given.items() if k != "cpu_offload"}, steps)
    pair("make", "it", strategy, **given)
    first, second = pair.try_all("train", "it", range(steps))
    assert first == second, "metrics differ between ranks"
    for mine, whole in zip(first, expected, strict=True):
        assert mine.keys() == whole.keys()
        losses = [name for name in whole if name.endswith("loss")]
        assert losses
        assert [mine[name] for name in losses] == pytest.approx([whole[name] for name in losses], abs=1e-4)
        assert mine["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-3)
        assert mine["learning_rate"] == whole["learning_rate"]
    found, _ = pair("weights", "it")
    assert found.keys() == last.keys()
    start = make_any("single", **{k: v for k, v in given.items() if k != "cpu_offload"}).weights().tensors
    moved = max(float(np.abs(last[name] - start[name].numpy()).max()) for name in last)
    assert moved > 3e-3, "nothing was trained"
    assert max(float(np.abs(found[name] - last[name]).max()) for name in last) < 1e-4
    pair("drop", "it")


@pytest.mark.parametrize(
    ("strategy", "case"),
    [
        *[(strategy, "grpo") for strategy in STRATEGIES],
        *[(strategy, "ppo, a value head") for strategy in ("fsdp2", "zero2")],
        *[(strategy, "ppo, a separate critic") for strategy in ("ddp", "zero1")],
    ],
)
def test_six_updates_match_the_single_strategy(pair: Ranks, strategy: str, case: str) -> None:
    compare(pair, strategy, case, CASES[case], 6)


@pytest.mark.slow
@every
@pytest.mark.parametrize("case", CASES)
def test_thirty_updates_match_the_single_strategy(pair: Ranks, strategy: str, case: str) -> None:
    compare(pair, strategy, case, CASES[case], 30)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1", "zero2", "zero3"])
def test_cpu_offload_trains_the_same(pair: Ranks, strategy: str) -> None:
    compare(pair, strategy, "ppo, a value head", {**CASES["ppo, a value head"], "cpu_offload": True}, 3)


@every
def test_low_rank_matrices_train_the_same(pair: Ranks, strategy: str) -> None:
    compare(pair, strategy, "lora", {"lora": 4, "learning_rate": 1e-2}, 3)


@every
def test_gradient_checkpointing_trains_the_same(pair: Ranks, strategy: str) -> None:
    compare(pair, strategy, "checkpointing", {"gradient_checkpointing": True}, 3)


@every
@pytest.mark.parametrize("given", [{}, {"gradient_checkpointing": True, "critic": "shared"}], ids=str)
def test_logits_in_chunks_train_the_same(pair: Ranks, strategy: str, given: dict[str, Any]) -> None:
    """Against whole logits in one process."""
    pair("set_max_logits", 100)
    try:
        compare(pair, strategy, f"chunks {given}", {"loss": "ppo", "entropy_coef": 0.01, **given}, 3)
    finally:
        pair("set_max_logits", 2**24)


@every
def test_padded_rows_train_the_same(pair: Ranks, strategy: str) -> None:
    compare(pair, strategy, "padded", {"layout": "padded"}, 3)


@every
@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_every_rank_returns_the_numbers_of_the_whole_batch(pair: Ranks, strategy: str, critic: str) -> None:
    given = {"kl_coef": 0.1, "critic": critic, "old_logprobs": "rollout"}
    local = make_any("single", **given)
    pair("make", "it", strategy, **given)
    train_any(local, range(2))
    pair("train", "it", range(2))
    expected = numbers_any(local, 5)
    for found in pair.try_all("numbers", "it", 5):
        for mine, whole in zip(found, expected, strict=True):
            assert np.abs(np.array(whole)).max() > 1e-3
            assert mine == pytest.approx(whole, abs=1e-4)
    pair("drop", "it")


@every
@pytest.mark.parametrize("kind", ["one row", "one long"])
def test_uneven_and_empty_shares_train_the_same(pair: Ranks, strategy: str, kind: str) -> None:
    """One rank has no row at all; or one row that is longer than all the others' micro-batches."""
    given = {"critic": "shared", "max_tokens_per_microbatch": 8}
    expected = train_any(make_any("single", **given), range(3), kind)
    pair("make", "it", strategy, **given)
    for found in pair.try_all("train", "it", range(3), kind):
        for mine, whole in zip(found, expected, strict=True):
            assert mine == pytest.approx(whole, abs=1e-4, rel=1e-3)
    pair("drop", "it")


@every
@pytest.mark.parametrize(
    "given",
    [{"loss": "ppo", "critic": "separate", "kl_coef": 0.1}, {"lora": 2, "kl_coef": 0.1}],
    ids=["a separate critic", "lora"],
)
def test_imitation_and_later_updates_match_the_single_strategy(
    pair: Ranks, strategy: str, given: dict[str, Any], tmp_path: Path
) -> None:
    """The schedule and the optimizer start afresh, and a separate critic starts from the taught policy."""
    local = make_any("single", **given)
    imitate_any(local, range(3), tmp_path / "single")
    pair("make", "it", strategy, **given)
    pair("imitate", "it", range(3), tmp_path / "ranks")
    taught = {n: t.numpy().copy() for n, t in local.weights().tensors.items()}
    assert gap(pair("weights", "it")[0], taught) < 1e-4
    start = {n: t.numpy() for n, t in make_any("single", **given).weights().tensors.items()}
    assert gap(taught, start) > 5e-3, "nothing was imitated"
    expected = train_any(local, range(2))
    for mine, whole in zip(pair("train", "it", range(2)), expected, strict=True):
        assert mine == pytest.approx(whole, rel=1e-2, abs=1e-3)
    assert gap(pair("weights", "it")[0], {n: t.numpy() for n, t in local.weights().tensors.items()}) < 1e-4
    for mine, whole in zip(pair("numbers", "it", 7), numbers_any(local, 7), strict=True):
        assert np.allclose(mine, whole, atol=1e-3)
    pair("drop", "it")


RARE = [pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero1", "zero2")]


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3", *RARE])
def test_experts_with_lora_are_trained_and_exported_as_by_the_single_strategy(
    pair: Ranks, strategy: str, tmp_path: Path
) -> None:
    """Under the names of checkpoints, over several files."""
    from safetensors import safe_open

    local = make_any("single", experts="qwen3_moe", lora=2)
    train_any(local, range(2))
    pair("make", "it", strategy, experts="qwen3_moe", lora=2, bucket_bytes=20_000)
    pair("train", "it", range(2))
    for name in ("single", "ranks"):
        (tmp_path / name).mkdir()
    local.export(tmp_path / "single")
    pair("export", "it", tmp_path / "ranks")
    found: dict[str, dict[str, Any]] = {"single": {}, "ranks": {}}
    for name, tensors in found.items():
        for file in (tmp_path / name).glob("*.safetensors"):
            with safe_open(file, "np") as opened:
                tensors |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    assert len(list((tmp_path / "ranks").glob("*.safetensors"))) > 1
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in found["ranks"]
    assert gap(found["ranks"], found["single"]) < 1e-5
    pair("drop", "it")


def gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in other)
