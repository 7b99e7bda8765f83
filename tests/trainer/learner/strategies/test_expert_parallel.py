"""Experts on several ranks: losses, gradients, evaluations and checkpoints of one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_cases import with_experts
from rank_cases import Ranks, make_any, numbers_any, train_any

from rollgym.core.errors import UsageError
from rollgym.trainer.learner.config import ParallelConfig
from rollgym.trainer.learner.sharded_checkpoint import open_checkpoint

EXPERT = ParallelConfig(expert=2)
GIVEN: dict[str, Any] = {"experts": "mixtral", "kl_coef": 0.1, "clip_norm": None}


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def losses(metrics: list[dict[str, float]]) -> list[float]:
    return [value for one in metrics for name, value in one.items() if name.endswith("loss")]


def first_moments(folder: Path, learner: Any) -> dict[str, Any]:
    """Adam's first moments: after one step the gradient, times a constant."""
    shapes = learner.strategy.shapes()
    with open_checkpoint(folder, shapes) as saved:
        return {name: saved.read(name, "exp_avg", 0, int(np.prod(shape))) for name, shape in shapes.items()}


def compare(
    ranks: Ranks,
    folder: Path,
    steps: int,
    kind: str = "mixed",
    parallel: ParallelConfig = EXPERT,
    **more: Any,
) -> None:
    """Gradient of the first update, losses, metrics, evaluation; each continues the other's checkpoint."""
    given = {**GIVEN, **more}
    local = make_any("single", **given)
    ranks("make", "it", "mesh", parallel=parallel, **given)
    expected, found = train_any(local, [0], kind), ranks.try_all("train", "it", [0], kind)
    for name in ("one", "many"):
        (folder / name).mkdir()
    local.save(folder / "one")
    ranks("save", "it", folder / "many")
    whole, ours = first_moments(folder / "one", local), first_moments(folder / "many", local)
    for name, value in whole.items():
        assert float((ours[name] - value).abs().max()) <= 1e-4 * float(value.abs().max()), name
    assert all(float(value.abs().max()) for name, value in whole.items() if name.startswith("model."))

    seeds = range(1, steps)
    expected += train_any(local, seeds, kind)
    found = [a + b for a, b in zip(found, ranks.try_all("train", "it", seeds, kind), strict=True)]
    assert all(metrics == found[0] for metrics in found), "metrics differ between ranks"
    assert losses(found[0]) == pytest.approx(losses(expected), abs=1e-4)
    for mine, one in zip(found[0], expected, strict=True):
        # Which tokens are read twice, or by no layer but the last, depends on the partition.
        for name in ("router_replay_frac", "router_mismatch_frac"):
            assert mine.pop(name, 0.0) == pytest.approx(one.pop(name, 0.0), abs=0.05)
        assert mine == pytest.approx(one, rel=1e-3, abs=1e-4)
    for answers in ranks.try_all("numbers", "it", 50):
        for mine, one in zip(answers, numbers_any(local, 50), strict=True):
            assert mine == pytest.approx(one, abs=1e-4)
    weights, _ = ranks("weights", "it")
    last = local.weights().tensors
    assert weights.keys() == last.keys()
    assert max(float(np.abs(weights[name] - last[name].numpy()).max()) for name in last) < 1e-4

    local.load(folder / "many")
    ranks("load", "it", folder / "one")
    again = losses(train_any(local, [1], kind)), losses(ranks("train", "it", [1], kind))
    assert again[0] == pytest.approx(again[1], abs=1e-4)
    if steps > 1:
        assert again[0] == pytest.approx(losses(expected[1:2]), abs=1e-4)
    ranks("drop", "it")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("routed", {}),
        pytest.param(
            "mixed",
            {"experts": "qwen3_moe", "critic": "separate", "loss": "ppo"},
            marks=pytest.mark.slow,
        ),
        pytest.param("routed", {"gradient_checkpointing": True, "layout": "padded"}, marks=pytest.mark.slow),
    ],
    ids=["router replay", "separate critic", "checkpointing"],
)
def test_two_ranks_match_one_process(pair: Ranks, tmp_path: Path, kind: str, more: dict[str, Any]) -> None:
    compare(pair, tmp_path, 3, kind, **more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", "routed"])
def test_thirty_updates_on_two_ranks_match_one_process(pair: Ranks, tmp_path: Path, kind: str) -> None:
    compare(pair, tmp_path, 30, kind)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["shard", "replicate"])
def test_four_ranks_match_one_process(four: Ranks, tmp_path: Path, other: str) -> None:
    compare(four, tmp_path, 3, "routed", ParallelConfig(**{"expert": 2, other: 2}))


def test_a_model_from_a_folder_is_read_in_parts(pair: Ranks, tmp_path: Path) -> None:
    """Each rank holds half of everything: of the experts its own, of the rest a shard."""
    with_experts("mixtral").save_pretrained(tmp_path)
    local = make_any("single", **GIVEN)
    pair("make", "it", "mesh", parallel=EXPERT, **GIVEN, folder=tmp_path)
    assert losses(pair("train", "it", [3], "routed")) == pytest.approx(
        losses(train_any(local, [3], "routed")), abs=1e-4
    )
    whole = 2 * 4 * local.modules.parameters  # policy and reference
    assert all(held["weights"] < 0.51 * whole for held in pair.try_all("held", "it"))
    pair("drop", "it")


def test_a_rank_whose_experts_no_token_chooses_takes_part(pair: Ranks) -> None:
    """Rows so short that experts stay idle on a rank, forwards and backwards."""
    pair("make", "it", "mesh", parallel=EXPERT, **GIVEN)
    local = make_any("single", **GIVEN)
    found = pair.try_all("train", "it", [4], "one row")
    assert losses(found[0]) == pytest.approx(losses(train_any(local, [4], "one row")), abs=1e-4)
    pair("drop", "it")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "has no experts that can be distributed"),
        ({"experts": "mixtral", "lora": 2}, "LoRA matrices"),
    ],
)
def test_models_whose_experts_cannot_be_distributed_are_refused(
    pair: Ranks, given: dict[str, Any], message: str
) -> None:
    for answer in pair.try_all("make", "it", "mesh", parallel=EXPERT, **given):
        assert isinstance(answer, UsageError)
        assert message in str(answer)


def test_experts_must_be_divisible_by_the_ranks(pair: Ranks) -> None:
    for answer in pair.try_all(
        "make", "it", "mesh", parallel=EXPERT, experts="mixtral", model={"num_local_experts": 3}
    ):
        assert isinstance(answer, UsageError)
        assert "has 3 experts" in str(answer)


def test_expert_parallelism_does_not_combine_with_tensor_parallelism() -> None:
    with pytest.raises(UsageError, match="cannot be combined"):
        ParallelConfig(expert=2, tensor=2)
