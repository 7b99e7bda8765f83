"""Checkpoints and exports: training continues bit for bit, and other software can load them."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from learner_cases import assert_same, differ, make_learner, mixed_batch, state, tiny, weights  # noqa: E402
from training import SMALL  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from rollgym.config.loader import load  # noqa: E402
from rollgym.core.errors import RunError  # noqa: E402
from rollgym.trainer.config import TrainConfig  # noqa: E402
from rollgym.trainer.runtime import MODEL, Components  # noqa: E402


@pytest.mark.parametrize("critic", ["none", "shared", "separate"])
def test_resuming_from_a_checkpoint_gives_the_same_bits(tmp_path: Path, critic: str) -> None:
    """Rule 35: the same bits as a learner that was never stopped."""
    settings: dict[str, Any] = {"mini_batches": 2, "schedule": "cosine", "warmup_steps": 2, "critic": critic}
    options = {"total_steps": 10, "seed": 3}
    batches = [mixed_batch(seed, also=("returns", "values")) for seed in range(4)]
    whole = make_learner(options=options, **settings)
    for number, batch in enumerate(batches):
        whole.update(batch)
        if number == 1:
            whole.save(tmp_path)
    other = make_learner(tiny(seed=5), options=options, **settings)
    other.load(tmp_path)
    assert other.steps == 4
    for batch in batches[2:]:
        other.update(batch)
    assert_same(state(other), state(whole), 0.0)
    assert differ(weights(whole), weights(make_learner())) > 1e-2


@pytest.mark.parametrize(
    "given",
    [
        {"model": tiny(hidden_size=64)},
        {"model": tiny(num_hidden_layers=1)},
        {"model": tiny(vocab_size=1)},  # would be spread over all of the vocabulary
        {"critic": "shared"},
    ],
    ids=["wider", "fewer layers", "one word", "a critic"],
)
def test_a_checkpoint_of_another_learner_is_refused_and_changes_nothing(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    make_learner(**given).save(tmp_path)
    learner = make_learner()
    before = weights(learner)
    with pytest.raises(
        RunError, match="does not match this model or learner config: parameter names or shapes differ"
    ):
        learner.load(tmp_path)
    assert_same(weights(learner), before, 0.0)


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_policy_is_a_model_that_anything_can_load(tmp_path: Path, tied: bool) -> None:
    learner = make_learner(tiny(tie_word_embeddings=tied))
    learner.update(mixed_batch())
    learner.export(tmp_path)
    assert "rollgym" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, learner.model(input_ids=ids).logits, atol=1e-5)
    again = make_learner(tmp_path)
    assert_same(weights(again), weights(learner), 0.0)


def test_what_a_run_exports_from_a_sharded_model_can_be_loaded(tmp_path: Path) -> None:
    """The base's index names files that an export does not have: readers would find no weights."""
    learner = make_learner()
    base = tmp_path / MODEL
    tiny().save_pretrained(base, max_shard_size="20KB")
    assert (base / "model.safetensors.index.json").is_file()
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "tokenizer.json"):
        (base / name).write_text("{}")
    config = load(TrainConfig, SMALL)
    parts = Components(config, tmp_path, None, None, None, None, learner, None, None)  # type: ignore[arg-type]
    for _ in range(2):
        learner.update(mixed_batch())
        parts.export(tmp_path / "final")
    assert {path.name for path in (tmp_path / "final").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "rollgym_model.json",
        "tokenizer.json",
    }
    again = make_learner(tmp_path / "final")
    assert_same(weights(again), weights(learner), 0.0)
