"""Models with experts: trained with LoRA and without, exported and sent under the names of checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import assert_same, differ, make_learner, mixed_batch, weights, with_experts  # noqa: E402
from safetensors import safe_open  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from rollgym.models.checkpoint_names import separable, to_checkpoint  # noqa: E402
from rollgym.models.hf_files import HFModelFiles  # noqa: E402
from rollgym.trainer.learner.config import LoraSettings  # noqa: E402
from rollgym.trainer.learner.weight_export import in_buckets, pieces_of, write_model  # noqa: E402

FAMILIES = pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
LAST = {
    "qwen3_moe": "model.layers.1.mlp.experts.3.down_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
}
"""A name that vLLM and SGLang read."""


def tensors_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(20)[None]).logits


@pytest.fixture
def standard(tmp_path: Path, family: str) -> dict[str, Any]:
    """What transformers itself writes."""
    with_experts(family).save_pretrained(tmp_path / "standard")
    return tensors_in(tmp_path / "standard")


@FAMILIES
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)], ids=["whole", "lora"])
@pytest.mark.parametrize("read", [False, True], ids=["made", "read"])
def test_an_export_has_the_names_of_checkpoints(
    tmp_path: Path, family: str, standard: dict[str, Any], lora: LoraSettings | None, read: bool
) -> None:
    learner = make_learner(tmp_path / "standard" if read else with_experts(family), lora=lora)
    learner.update(mixed_batch())
    learner.update(mixed_batch(1))
    (tmp_path / "out").mkdir()
    learner.export(tmp_path / "out")
    found = tensors_in(tmp_path / "out")
    assert LAST[family] in found
    assert {name: one.shape for name, one in found.items()} == {n: t.shape for n, t in standard.items()}
    assert differ(found, standard) > 1e-3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(loaded), logits(learner.model), atol=1e-4)


@FAMILIES
def test_lora_trains_experts_and_merges_them(family: str) -> None:
    learner = make_learner(with_experts(family), lora=LoraSettings(rank=2))
    before = weights(learner)
    assert_same(before, weights(make_learner(with_experts(family))), 0.0)
    for seed in range(2):
        learner.update(mixed_batch(seed))
    after = weights(learner)
    experts = [name for name in after if ".experts." in name]
    assert len(experts) == 4
    for name in experts:
        moved = (after[name] - before[name]).abs().amax((1, 2))
        assert bool((moved > 1e-5).any()), name
    plain = with_experts(family)
    plain.load_state_dict(after)
    assert torch.allclose(logits(plain), logits(learner.model), atol=1e-4)


@FAMILIES
def test_a_folder_with_fused_names_is_exported_under_the_usual_ones(
    tmp_path: Path, family: str, standard: dict[str, Any]
) -> None:
    """Versions before this one wrote such folders."""
    folder = tmp_path / "standard"
    model = with_experts(family)
    from safetensors.torch import save_file

    save_file(
        {n: p.detach() for n, p in model.named_parameters()}, folder / "model.safetensors", {"format": "pt"}
    )
    learner = make_learner(folder)
    (tmp_path / "out").mkdir()
    learner.export(tmp_path / "out")
    assert_same(tensors_in(tmp_path / "out"), standard, 0.0)


@FAMILIES
def test_buckets_are_written_as_one_consistent_folder(
    tmp_path: Path, family: str, standard: dict[str, Any]
) -> None:
    """The export of several ranks: an index and its files, and no file from before."""
    model = with_experts(family)
    pieces = pieces_of(model, lambda parameter: parameter.numel())
    assert separable(model, {piece.name: piece.parameters[0].shape for piece in pieces})
    sets = in_buckets(pieces, 4000)
    out = tmp_path / "out"
    out.mkdir()
    for old in ("model.safetensors", "model-00009-of-00009.safetensors", "pytorch_model.bin.index.json"):
        (out / old).write_text("old")
    buckets = ([(one.name, one.merge([p.detach() for p in one.parameters])) for one in part] for part in sets)
    model.config.save_pretrained(out)
    write_model(out, model, iter(buckets), len(sets))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = {file.name for file in out.iterdir() if file.name != "config.json"}
    assert files == {"model.safetensors.index.json", *index["weight_map"].values()}
    assert len(files) > 3
    assert index["weight_map"].keys() == standard.keys()
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in standard.values())
    assert_same(tensors_in(out), standard, 0.0)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(loaded), logits(model))


@FAMILIES
def test_sglang_is_sent_the_names_that_its_folder_has(
    tmp_path: Path, family: str, standard: dict[str, Any]
) -> None:
    learner = make_learner(with_experts(family, seed=3))
    tensors = learner.weights().tensors or {}
    assert LAST[family] not in tensors, "the torch engine's own names are those of the module"
    sent = HFModelFiles.read(tmp_path / "standard").fitting(tensors)
    assert sent.keys() == standard.keys()
    assert_same(sent, to_checkpoint(learner.model, tensors), 0.0)
    assert differ(sent, standard) > 0.1
