"""Parameters are counted from a configuration exactly: as many as the model that transformers builds has."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import UsageError
from rollgym.devices.models import PRESETS, ModelShape, find_model, read_config

SMALL = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16}),
        ("mistral", {"head_dim": 24}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", {**EXPERTS, "head_dim": 16}),
        ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [0]}),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 56}),
    ],
)
def test_parameters_are_those_of_the_built_model(family: str, changes: dict[str, Any]) -> None:
    assert counted(family, {**SMALL, **changes}) == built(family, {**SMALL, **changes})


@pytest.mark.parametrize(
    ("word", "family"),
    [("0.5b", "qwen2"), ("7b", "qwen2"), ("8b", "llama"), ("8x7b", "mixtral")],
)
def test_a_preset_is_as_big_as_the_model_it_is_named_after(word: str, family: str) -> None:
    shape = PRESETS[word]
    assert built(family, config_of(shape)) == shape.parameters


@pytest.mark.parametrize(
    ("word", "parameters", "active"),
    [
        # The exact counts are those of the published weights; the others what the model cards say.
        ("0.5b", 494_032_768, None),
        ("7b", 7_615_616_512, None),
        ("8b", 8_030_261_248, None),
        ("70b", 70_553_706_496, None),
        ("72b", 72.7e9, None),
        ("8x7b", 46.7e9, 12.9e9),
        ("30b-moe", 30.5e9, 3.3e9),
        ("235b-moe", 235e9, 22e9),
        ("200b-moe", 200e9, 19e9),
    ],
)
def test_presets_have_their_published_sizes(word: str, parameters: float, active: float | None) -> None:
    exact = isinstance(parameters, int)
    assert PRESETS[word].parameters == pytest.approx(parameters, rel=0 if exact else 0.005)
    assert PRESETS[word].active_parameters == pytest.approx(active or parameters, rel=0.02)


def test_a_folder_and_a_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    assert find_model(str(tmp_path)) == find_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt2"}, "Unsupported model_type 'gpt2'"),
        ({"model_type": "llama"}, "has no num_attention_heads"),
        ({"model_type": "llama", **SMALL, "hidden_size": "big"}, "hidden_size is 'big'"),
        ({"model_type": "llama", **SMALL, "num_attention_heads": 0}, "num_attention_heads is 0"),
    ],
)
def test_incomplete_configurations_are_rejected(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_config(config)
    assert words in str(caught.value)


def test_unknown_presets_and_broken_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    for words, sentence in [
        ("71b", "Did you mean"),
        ("./71b", "neither a folder"),
        (str(tmp_path), "as JSON"),
    ]:
        with pytest.raises(UsageError) as caught:
            find_model(words)
        assert sentence in str(caught.value)


def counted(family: str, config: dict[str, Any]) -> int:
    return read_config({"model_type": family, **config}).parameters


def built(family: str, config: dict[str, Any]) -> int:
    """Parameters of a model without memory for them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    return sum(parameter.numel() for parameter in model.parameters())


def config_of(shape: ModelShape) -> dict[str, Any]:
    found = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.tied,
    }
    return found | ({"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_used})
