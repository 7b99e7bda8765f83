"""Models that are built without weights and read shard by shard."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import tiny, with_experts
from rank_cases import Ranks, make_any, numbers_any, train_any

CASES: dict[str, dict[str, Any]] = {
    "a reference": {"kl_coef": 0.1, "model": {"num_hidden_layers": 4}},
    "untied": {"kl_coef": 0.1, "model": {"num_hidden_layers": 3, "tie_word_embeddings": False}},
    "a separate critic": {"loss": "ppo", "critic": "separate", "kl_coef": 0.1},
    "lora": {"lora": 4, "learning_rate": 1e-2, "kl_coef": 0.1},
    "experts": {"experts": "qwen3_moe", "kl_coef": 0.1},
    "on the host": {"cpu_offload": True, "kl_coef": 0.1, "critic": "shared"},
}


def written(folder: Path, given: dict[str, Any]) -> Path:
    """The folder of the model that a learner is given."""
    experts = given.get("experts")
    model = tiny(0, **given.get("model", {})) if experts is None else with_experts(experts)
    model.to(given.get("saved_as", torch.float32)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_model_from_a_folder_trains_as_in_one_process(pair: Ranks, case: str, tmp_path: Path) -> None:
    given = CASES[case]
    alone = {key: value for key, value in given.items() if key != "cpu_offload"}
    local = make_any("single", **alone)
    pair("make", "it", "fsdp2", folder=written(tmp_path / "model", given), **given)
    assert pair("packed", "it")
    expected = train_any(local, range(3))
    for found in pair.try_all("train", "it", range(3)):
        for mine, whole in zip(found, expected, strict=True):
            assert mine == pytest.approx(whole, abs=1e-4, rel=1e-3)
    for found in pair.try_all("numbers", "it", 5):
        for mine, whole in zip(found, numbers_any(local, 5), strict=True):
            assert np.abs(np.array(mine) - np.array(whole)).max() < 1e-4
    pair("drop", "it")


def test_another_reference_is_read_shard_by_shard(pair: Ranks, tmp_path: Path) -> None:
    given = {"kl_coef": 0.1, "model": {"num_hidden_layers": 3}}
    other = make_any("single", seed=3, **given)
    (tmp_path / "other").mkdir()
    other.export(tmp_path / "other")
    pair("make", "it", "fsdp2", folder=written(tmp_path / "model", given), **given)
    pair("set_reference", "it", tmp_path / "other")
    before, after = pair("numbers", "it", 5)[:2]
    assert np.abs(np.array(before) - np.array(after)).max() > 0.1
    assert after == pytest.approx(numbers_any(other, 5)[0], abs=1e-4)
    pair("drop", "it")


def test_no_rank_holds_a_whole_model(pair: Ranks, tmp_path: Path) -> None:
    """Not even while it starts: of 16 layers, two are read to choose the layout."""
    sizes = {"num_hidden_layers": 16, "hidden_size": 256, "intermediate_size": 1024}
    folder = written(tmp_path / "model", {"model": sizes, "saved_as": torch.bfloat16})
    whole = 2 * (folder / "model.safetensors").stat().st_size  # in float32
    pair("start_peak", folder)  # imports
    for peak in pair.try_all("start_peak", folder):
        # Policy and reference, of which each rank holds one half, and what is read at the moment.
        assert peak < 1.3 * whole, f"{peak / whole:.2f} of one whole model"


@pytest.mark.parametrize("checkpointing", [True, False])
def test_weights_are_not_copied_whole_in_bfloat16(pair: Ranks, checkpointing: bool) -> None:
    """Layers are gathered in bfloat16 one by one, and freed before the backward pass gathers them again."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 1024}
    given = {"dtype": "bfloat16", "gradient_checkpointing": checkpointing, "model": sizes}
    for kept, weights in pair.try_all("kept_by_forward", **given):
        assert kept < 0.2 * 2 * weights, f"{kept / (2 * weights):.2f} of the weights in bfloat16"


def test_bfloat16_trains_like_one_process_in_bfloat16(pair: Ranks) -> None:
    """Not bit by bit: here the hidden states are bfloat16 too, with autocast they are float32."""
    given = {"dtype": "bfloat16", "critic": "shared", "kl_coef": 0.1}
    exact = train_any(make_any("single", **{**given, "dtype": "float32"}), range(4))
    pair("make", "it", "fsdp2", **given)
    found = pair("train", "it", range(4))
    for mine, whole in zip(found, exact, strict=True):
        assert mine["policy_loss"] == pytest.approx(whole["policy_loss"], abs=0.02)
        assert mine["value_loss"] == pytest.approx(whole["value_loss"], rel=0.05)
        assert mine["grad_norm"] == pytest.approx(whole["grad_norm"], rel=0.05)
    pair("drop", "it")


def test_a_folder_without_a_weight_is_refused_on_all_ranks(pair: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = written(tmp_path / "model", {"model": {"num_hidden_layers": 3}}) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    for error in pair.try_all("make_from_folder", file.parent):
        assert "Cannot load a model from" in str(error)
        assert "down_proj" in str(error)
