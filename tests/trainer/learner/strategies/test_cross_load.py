"""A checkpoint loads with any strategy and any number of processes."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rank_cases import Ranks, make_any, train_any

from rollgym.core.errors import RunError

STRATEGIES = ["ddp", "fsdp2", "zero1", "zero2", "zero3"]
GIVEN: dict[str, Any] = {"critic": "shared", "critic_rate": 3e-3, "schedule": "linear", "loss": "ppo"}
Saved = dict[str, tuple[Path, list[list[float]]]]


def crossed(writers: list[str], readers: list[str]) -> Any:
    """All pairs; by default each writer meets one reader, and each reader one writer or more."""
    return pytest.mark.parametrize(
        ("writer", "reader"),
        [
            pytest.param(writer, reader, marks=() if by == (of + 1) % len(readers) else pytest.mark.slow)
            for (of, writer), (by, reader) in product(enumerate(writers), enumerate(readers))
        ],
    )


def losses(metrics: list[dict[str, float]]) -> list[list[float]]:
    return [[one["policy_loss"], one["value_loss"]] for one in metrics]


def saved_by(
    where: Ranks | None, strategy: str, folder: Path, **given: Any
) -> tuple[Path, list[list[float]]]:
    """A checkpoint after 4 updates, and the losses of the 3 that followed."""
    path = folder / strategy
    if where is None:
        learner = make_any(strategy, **given)
        train_any(learner, range(4))
        path.mkdir()
        learner.save(path)
        return path, losses(train_any(learner, range(4, 7)))
    where("make", "writer", strategy, **given)
    where("train", "writer", range(4))
    where("save", "writer", path)
    after = losses(where("train", "writer", range(4, 7)))
    where("drop", "writer")
    return path, after


@pytest.fixture(scope="session")
def by_pair(pair: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("pair")
    found = {one: saved_by(pair, one, folder, **GIVEN) for one in STRATEGIES}
    return found | {"single": saved_by(None, "single", folder, **GIVEN)}


@pytest.fixture(scope="session")
def by_one(solo: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("one")
    return {one: saved_by(solo, one, folder, **GIVEN) for one in ("ddp", "fsdp2", "zero2", "zero3")}


def goes_on(where: Ranks | None, strategy: str, saved: tuple[Path, list[list[float]]], **given: Any) -> None:
    """A learner that began elsewhere, and learnt something else already, goes on as the one that saved."""
    path, expected = saved
    # The model that small matrices go with is not in the checkpoint; everything else is.
    given = {**GIVEN, **given, "seed": 0 if "lora" in given else 5}
    if where is None:
        learner = make_any(strategy, **given)
        train_any(learner, [50])
        learner.load(path)
        found = losses(train_any(learner, range(4, 7)))
    else:
        where("make", "reader", strategy, **given)
        where("train", "reader", [50])
        assert where("load", "reader", path) == 4
        found = losses(where("train", "reader", range(4, 7)))
        where("drop", "reader")
    assert sum(found, []) == pytest.approx(sum(expected, []), abs=1e-4)


@crossed([*STRATEGIES, "single"], [*STRATEGIES, "single"])
def test_every_strategy_loads_from_every_other(pair: Ranks, by_pair: Saved, writer: str, reader: str) -> None:
    goes_on(None if reader == "single" else pair, reader, by_pair[writer])


@crossed([*STRATEGIES, "single"], ["ddp", "fsdp2", "zero2", "zero3"])
def test_one_process_loads_from_two(solo: Ranks, by_pair: Saved, writer: str, reader: str) -> None:
    goes_on(solo, reader, by_pair[writer])


@crossed(["ddp", "fsdp2", "zero2", "zero3"], STRATEGIES)
def test_two_processes_load_from_one(pair: Ranks, by_one: Saved, writer: str, reader: str) -> None:
    goes_on(pair, reader, by_one[writer])


@pytest.mark.parametrize(("writer", "reader"), [("zero3", "fsdp2"), ("fsdp2", "zero1"), ("ddp", "zero3")])
@pytest.mark.parametrize("given", [{"critic": "separate"}, {"lora": 4}, {"cpu_offload": True}], ids=str)
def test_critics_and_small_matrices_go_along(
    pair: Ranks, tmp_path: Path, writer: str, reader: str, given: dict[str, Any]
) -> None:
    if writer == "ddp":
        given = {key: value for key, value in given.items() if key != "cpu_offload"}
    saved = saved_by(pair, writer, tmp_path, **GIVEN | given)
    goes_on(pair, reader, saved, **given)
    goes_on(None, "single", saved, **{key: value for key, value in given.items() if key != "cpu_offload"})


def test_a_checkpoint_before_the_first_step_is_one_too(pair: Ranks, tmp_path: Path) -> None:
    for number, (writer, reader) in enumerate(zip(STRATEGIES, STRATEGIES[1:] + STRATEGIES[:1], strict=True)):
        pair("make", "writer", writer)
        pair("save", "writer", tmp_path / str(number))
        pair("make", "reader", reader, seed=5)
        pair("train", "reader", [50])
        assert pair("load", "reader", tmp_path / str(number)) == 0
        expected, found = (pair("train", key, range(2)) for key in ("writer", "reader"))
        assert [one["policy_loss"] for one in found] == pytest.approx(
            [one["policy_loss"] for one in expected], abs=1e-4
        )
    pair("drop")


def test_no_rank_writes_more_than_its_share(by_pair: Saved) -> None:
    for strategy in STRATEGIES:
        manifest = json.loads((by_pair[strategy][0] / "shards.json").read_text())
        assert (manifest["strategy"], manifest["world"], manifest["steps"]) == (strategy, 2, 4)
        counts = [sum(stop - start for start, stop in one["ranges"].values()) for one in manifest["parts"]]
        total = sum(_numel(one["shape"]) for one in manifest["parameters"].values())
        assert sum(counts) == total
        assert max(counts) < 0.52 * total


def _numel(shape: list[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def test_a_broken_checkpoint_is_refused_on_all_ranks_and_changes_nothing(pair: Ranks, tmp_path: Path) -> None:
    pair("make", "it", "fsdp2")
    before, _ = pair("weights", "it")
    pair("save", "it", tmp_path / "whole")
    for damage in ("no manifest", "no part", "half a part", "another model"):
        path = tmp_path / damage
        pair(
            "make", "other", "fsdp2", **({"model": {"hidden_size": 64}} if damage == "another model" else {})
        )
        pair("save", "other", path)
        part = path / "shard-00001-of-00002.safetensors"
        if damage == "no manifest":
            (path / "shards.json").unlink()
        elif damage == "no part":
            part.unlink()
        elif damage == "half a part":
            part.write_bytes(part.read_bytes()[:2000])
        for error in pair.try_all("load", "it", path):
            assert isinstance(error, RunError)
            assert str(path) in str(error)
    with pytest.raises(RunError, match="Cannot read the checkpoint in "):
        make_any("single").load(tmp_path / "no part")
    after, _ = pair("weights", "it")
    assert all((after[name] == before[name]).all() for name in before)
    pair("drop")


def test_a_single_checkpoint_in_the_same_folder_is_the_newest(pair: Ranks, tmp_path: Path) -> None:
    pair("make", "it", "ddp")
    pair("save", "it", tmp_path)
    learner = make_any("single")
    train_any(learner, range(2))
    learner.save(tmp_path)
    assert pair("load", "it", tmp_path) == 2
    pair("save", "it", tmp_path)
    pair("train", "it", [3])
    assert pair("load", "it", tmp_path) == 2
    pair("drop", "it")
