"""The device mesh: tensor parallel, sharded and copied models train as in one process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_cases import tiny
from rank_cases import Ranks, make_any, numbers_any, train_any

from rollgym.core.errors import UsageError
from rollgym.trainer.learner.config import LearnerConfig, ParallelConfig
from rollgym.trainer.learner.sharded_checkpoint import open_checkpoint
from rollgym.trainer.learner.strategies import check_parallel, find_strategy

TENSOR = ParallelConfig(tensor=2)
COPIES = ParallelConfig(replicate=2, shard=2)
FULL: dict[str, Any] = {"critic": "shared", "critic_rate": 3e-3, "schedule": "linear", "loss": "ppo"}


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def losses(metrics: list[dict[str, float]]) -> list[float]:
    return [value for one in metrics for name, value in one.items() if name.endswith("loss")]


def compare(ranks: Ranks, given: dict[str, Any], steps: int, parallel: ParallelConfig = TENSOR) -> None:
    local = make_any("single", **{key: value for key, value in given.items() if key != "cpu_offload"})
    start = {name: tensor.numpy().copy() for name, tensor in local.weights().tensors.items()}
    expected = train_any(local, range(steps))
    ranks("make", "it", "mesh", parallel=parallel, **given)
    found = ranks.try_all("train", "it", range(steps))
    assert all(metrics == found[0] for metrics in found), "metrics differ between ranks"
    assert losses(found[0]) == pytest.approx(losses(expected), abs=1e-4)
    for mine, whole in zip(found[0], expected, strict=True):
        assert mine == pytest.approx(whole, rel=1e-3, abs=1e-4)
    weights, _ = ranks("weights", "it")
    last = {name: tensor.numpy() for name, tensor in local.weights().tensors.items()}
    assert weights.keys() == last.keys()
    assert max(float(np.abs(last[name] - start[name]).max()) for name in last) > 1e-3, "nothing was trained"
    assert max(float(np.abs(weights[name] - last[name]).max()) for name in last) < 1e-4
    if given.get("kl_coef"):
        for answers in ranks.try_all("numbers", "it", 5):
            for mine, whole in zip(answers, numbers_any(local, 5), strict=True):
                assert mine == pytest.approx(whole, abs=1e-4)
    ranks("drop", "it")


LONG: dict[str, Any] = {"kl_coef": 0.1, "schedule": "cosine", "weight_decay": 0.01}
meshes = pytest.mark.parametrize("parallel", [TENSOR, COPIES], ids=["tensor x shard", "replicate x shard"])


@meshes
def test_four_ranks_match_the_single_strategy(four: Ranks, parallel: ParallelConfig) -> None:
    compare(four, LONG, 4, parallel)


@pytest.mark.slow
@meshes
def test_thirty_updates_on_four_ranks_match_the_single_strategy(
    four: Ranks, parallel: ParallelConfig
) -> None:
    compare(four, LONG, 30, parallel)


@pytest.mark.slow
def test_copies_of_a_tensor_parallel_model_match_the_single_strategy(four: Ranks) -> None:
    compare(four, {"kl_coef": 0.1}, 6, ParallelConfig(replicate=2, tensor=2))


CASES: dict[str, dict[str, Any]] = {
    "a value head": {"loss": "ppo", "critic": "shared", "critic_rate": 3e-3, "entropy_coef": 0.01},
    "a separate critic": {"loss": "ppo", "critic": "separate", "mini_batches": 2, "kl_coef": 0.1},
    "lora": {"lora": 4, "learning_rate": 1e-2, "kl_coef": 0.1},
    "checkpointing": {"gradient_checkpointing": True, "layout": "padded"},
    "untied, on the host": {"model": {"tie_word_embeddings": False}, "cpu_offload": True},
}


@pytest.mark.parametrize("case", CASES)
def test_two_tensor_parallel_ranks_match_the_single_strategy(pair: Ranks, case: str) -> None:
    compare(pair, CASES[case], 3)


@pytest.mark.slow
def test_thirty_updates_on_two_ranks_match_the_single_strategy(pair: Ranks) -> None:
    compare(pair, LONG, 30)


def test_logits_of_a_part_of_the_vocabulary_are_computed_in_chunks(pair: Ranks) -> None:
    pair("set_max_logits", 100)
    try:
        compare(pair, {"loss": "ppo", "entropy_coef": 0.01, "lora": 2, "learning_rate": 1e-2}, 2)
    finally:
        pair("set_max_logits", 2**24)


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_capped_logits_and_normalized_heads_train_the_same(pair: Ranks, family: str) -> None:
    """Gemma 2 caps its logits after the output layer; Qwen 3 has a norm that every head shares."""
    compare(pair, {"family": family, "entropy_coef": 0.01, "loss": "ppo"}, 2)


def test_gradients_match_those_of_one_process(four: Ranks, tmp_path: Path) -> None:
    """Adam's first moment after one step is the gradient, times a constant."""
    given: dict[str, Any] = {"clip_norm": None, "loss": "ppo", "critic": "separate"}
    local = make_any("single", **given)
    train_any(local, [3])
    (tmp_path / "single").mkdir()
    local.save(tmp_path / "single")
    four("make", "it", "mesh", parallel=TENSOR, **given)
    four("train", "it", [3])
    four("save", "it", tmp_path / "ranks")
    four("drop", "it")
    shapes = local.strategy.shapes()
    with (
        open_checkpoint(tmp_path / "single", shapes) as whole,
        open_checkpoint(tmp_path / "ranks", shapes) as parts,
    ):
        for name, shape in shapes.items():
            expected, found = (one.read(name, "exp_avg", 0, int(np.prod(shape))) for one in (whole, parts))
            assert expected is not None
            assert found is not None
            assert float((expected - found).abs().max()) <= 1e-4 * float(expected.abs().max()), name


@pytest.mark.parametrize("case", ["a reference", "lora", "a separate critic"])
def test_a_model_from_a_folder_is_read_in_parts(pair: Ranks, case: str, tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "a reference": {"kl_coef": 0.1},
        "lora": {"lora": 4, "learning_rate": 1e-2, "kl_coef": 0.1},
        "a separate critic": {"loss": "ppo", "critic": "separate"},
    }
    tiny(0, num_hidden_layers=3, tie_word_embeddings=case != "lora").save_pretrained(tmp_path)
    compare(pair, {**cases[case], "folder": tmp_path}, 2)


def test_no_rank_holds_a_whole_model(four: Ranks, tmp_path: Path) -> None:
    """Neither while it starts nor later, with a reference."""
    sizes = {"num_hidden_layers": 12, "hidden_size": 128, "intermediate_size": 512, "vocab_size": 512}
    model = tiny(0, **sizes, tie_word_embeddings=False)
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    peaks = four.try_all("start_peak", tmp_path, "mesh", parallel=TENSOR)
    assert max(peaks) < 1.3 * whole, "policy and reference, a quarter of each, and the layers of the check"
    four("make", "it", "mesh", parallel=TENSOR, folder=tmp_path)
    for held in four.try_all("held", "it"):
        assert held["weights"] < 0.26 * whole
    four("drop", "it")


def test_no_rank_has_the_logits_of_the_whole_vocabulary(pair: Ranks) -> None:
    """With a vocabulary that outweighs everything else, a pass keeps half of what one process keeps."""
    sizes = {"vocab_size": 4096, "num_hidden_layers": 1}
    peaks = pair.try_all("score_peak", "mesh", parallel=TENSOR, model=sizes)
    whole = pair.try_all("score_peak", "fsdp2", model=sizes)
    assert max(peaks) < 0.65 * min(whole)


def test_bfloat16_is_as_near_to_float32_as_with_fsdp2(pair: Ranks) -> None:
    exact = make_any("single")
    expected = exact.logprobs(_batch(exact))
    gaps = []
    for strategy, more in (("fsdp2", {}), ("mesh", {"parallel": TENSOR})):
        pair("make", "it", strategy, dtype="bfloat16", **more)
        gaps.append(float(np.abs(pair("logprobs", "it", 5) - expected).mean()))
        pair("train", "it", range(2))
        pair("drop", "it")
    assert 0 < gaps[1] < 2 * gaps[0]


def _batch(learner: Any) -> Any:
    from rank_cases import batch_for

    return batch_for(learner, 5)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor x shard": ("mesh", {"parallel": TENSOR}),
    "replicate x shard": ("mesh", {"parallel": COPIES}),
    "tensor": ("mesh", {"parallel": TENSOR}),
    "single": ("single", {}),
    **{name: (name, {}) for name in ("ddp", "fsdp2", "zero1", "zero2", "zero3")},
}
MANY = {"tensor x shard", "replicate x shard"}
"""Kinds that run on four ranks here; the others run on two, or in one process."""
CROSS = [
    ("tensor x shard", "single"),
    ("tensor x shard", "zero3"),
    ("tensor x shard", "tensor"),
    ("replicate x shard", "tensor x shard"),
    ("single", "tensor x shard"),
    ("zero3", "tensor x shard"),
    ("zero1", "tensor"),
    ("tensor", "replicate x shard"),
]
_all = {(a, b) for a in KINDS for b in KINDS if "tensor" in a + b or "replicate" in a + b}
PAIRS = [*CROSS, *[pytest.param(*one, marks=pytest.mark.slow) for one in sorted(_all - set(CROSS))]]


class Saved:
    """Checkpoints after 3 updates by each kind, and the losses of the 2 that follow."""

    def __init__(self, folder: Path, pair: Ranks, four: Ranks) -> None:
        self._folder, self._pair, self._four = folder, pair, four
        self._made: dict[str, tuple[Path, list[float]]] = {}

    def ranks(self, kind: str) -> Ranks | None:
        return None if kind == "single" else self._four if kind in MANY else self._pair

    def of(self, kind: str) -> tuple[Path, list[float]]:
        if kind not in self._made:
            (strategy, given), ranks = KINDS[kind], self.ranks(kind)
            path = self._folder / kind.replace(" ", "")
            if ranks is None:
                learner = make_any(strategy, **FULL)
                train_any(learner, range(3))
                path.mkdir()
                learner.save(path)
                after = train_any(learner, range(3, 5))
            else:
                ranks("make", "writer", strategy, **FULL, **given)
                ranks("train", "writer", range(3))
                ranks("save", "writer", path)
                after = ranks("train", "writer", range(3, 5))
                ranks("drop", "writer")
            self._made[kind] = path, losses(after)
        return self._made[kind]


@pytest.fixture(scope="module")
def saved(pair: Ranks, four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"), pair, four)


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_checkpoints_load_across_meshes_and_strategies(saved: Saved, writer: str, reader: str) -> None:
    path, expected = saved.of(writer)
    (strategy, given), ranks = KINDS[reader], saved.ranks(reader)
    if ranks is None:
        learner = make_any(strategy, seed=5, **FULL)
        train_any(learner, [50])
        learner.load(path)
        found = train_any(learner, range(3, 5))
    else:
        ranks("make", "reader", strategy, seed=5, **FULL, **given)
        ranks("train", "reader", [50])
        assert ranks("load", "reader", path) == 3
        found = ranks("train", "reader", range(3, 5))
        ranks("drop", "reader")
    assert losses(found) == pytest.approx(expected, abs=1e-4)


def test_every_part_is_written_once(saved: Saved) -> None:
    for kind, number in (("tensor x shard", 2), ("replicate x shard", 1)):
        manifest = json.loads((saved.of(kind)[0] / "shards.json").read_text())
        assert (manifest["format"], manifest["world"]) == (number, 4)
        ranges = [stop - start for part in manifest["parts"] for start, stop in part["ranges"].values()]
        boxes = [
            int(np.prod(box["sizes"])) for part in manifest["parts"] for box in part.get("boxes", {}).values()
        ]
        whole = sum(int(np.prod(entry["shape"])) for entry in manifest["parameters"].values())
        assert sum(ranges) + sum(boxes) == whole


def test_local_shards_cover_every_parameter(four: Ranks) -> None:
    four("make", "it", "mesh", parallel=TENSOR)
    whole, _ = four("weights", "it")
    covered = {name: np.zeros_like(values) for name, values in whole.items()}
    for shards in four.try_all("local_shards", "it"):
        for name, offsets, values in shards:
            index = tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))
            np.testing.assert_array_equal(values, whole[name][index])
            covered[name][index] = 1
    assert all(flags.all() for flags in covered.values())
    four("drop", "it")


def test_offloading_and_imitation_change_nothing(pair: Ranks, tmp_path: Path) -> None:
    given: dict[str, Any] = {"parallel": TENSOR, "loss": "ppo", "critic": "separate", "kl_coef": 0.1}
    pair("make", "plain", "mesh", **given)
    pair("make", "it", "mesh", **given)
    expected = pair("train", "plain", range(3))
    assert pair("train_with_offload", "it", range(3), tmp_path / "saved") == expected
    for key in ("plain", "it"):
        pair("imitate", key, range(2), tmp_path / key)
    assert pair("train", "it", [7]) == pair("train", "plain", [7])
    pair("drop")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parallel": ParallelConfig(tensor=2), "model": {"num_key_value_heads": 1}}, "does not divide"),
        ({"parallel": ParallelConfig(tensor=2), "model": {"vocab_size": 51}}, "not divisible by"),
        ({"parallel": ParallelConfig(tensor=2), "family": "gpt2"}, "has no tensor parallel plan"),
        ({"parallel": ParallelConfig(tensor=4)}, "must divide the number of ranks, 2"),
        ({"parallel": ParallelConfig(shard=2, tensor=2)}, "must equal the number of ranks, 2"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_on_all_ranks(
    pair: Ranks, given: dict[str, Any], message: str
) -> None:
    for error in pair.try_all("make", "it", "mesh", **given):
        assert isinstance(error, UsageError), error
        assert message in str(error)


def test_dimensions_are_checked_without_ranks() -> None:
    assert ParallelConfig(tensor=2, replicate=2).sizes(16)["shard"] == 4
    with pytest.raises(UsageError, match=r"learner\.parallel\.tensor must be at least 1"):
        ParallelConfig(tensor=0)
    with pytest.raises(UsageError, match=r"learner\.parallel requires learner\.strategy=mesh"):
        find_strategy("fsdp2").check(world=2, cpu_offload=False, parallel=TENSOR)
    with pytest.raises(UsageError, match=r"learner\.parallel requires learner\.strategy=mesh"):
        check_parallel(LearnerConfig(parallel=TENSOR))
    check_parallel(LearnerConfig(parallel=TENSOR, strategy="mesh"))
