"""LoRA: small matrices are trained, and what an engine gets is a whole model that says the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from learner_cases import (  # noqa: E402
    VOCABULARY,
    assert_same,
    differ,
    gradient,
    make_learner,
    mixed_batch,
    shaken,
    state,
    tiny,
    weights,
)
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from rollgym.core.errors import UsageError  # noqa: E402
from rollgym.trainer.learner.config import LoraSettings  # noqa: E402
from rollgym.trainer.learner.lora import add_lora  # noqa: E402
from rollgym.trainer.losses.settings import LossConfig  # noqa: E402

LORA = LoraSettings(rank=4)


def biased() -> Any:
    """A model whose projections have biases."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return shaken(
        Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, bos_token_id=None, eos_token_id=None)).eval()
    )


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.arange(20)[None]).logits


def test_it_begins_as_the_model_itself() -> None:
    plain, learner = make_learner(), make_learner(lora=LORA)
    batch = mixed_batch()
    assert np.array_equal(learner.logprobs(batch), plain.logprobs(batch))
    assert_same(weights(learner), weights(plain), 0.0)


def test_only_the_small_matrices_are_trained() -> None:
    learner = make_learner(lora=LORA)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    for seed in range(2):
        learner.update(mixed_batch(seed))
    changed = {name for name, p in learner.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert sum(before[name].numel() for name in changed) < sum(p.numel() for p in tiny().parameters()) / 2


@pytest.mark.parametrize(
    "make", [tiny, biased, lambda: tiny(tie_word_embeddings=False)], ids=["llama", "biases", "untied"]
)
def test_merged_weights_are_a_plain_model_with_the_same_logits(make: Any) -> None:
    learner = make_learner(make(), lora=LORA)
    for seed in range(3):
        learner.update(mixed_batch(seed))
    before = logits(learner.model)
    merged = make()
    missing = merged.load_state_dict(weights(learner), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}  # tied: the same tensor under another name
    merged.tie_weights()
    assert torch.allclose(logits(merged), before, atol=1e-4)
    assert (logits(make()) - before).abs().max() > 0.05
    assert torch.equal(logits(learner.model), before), "merging changed the model itself"


def test_the_reference_is_the_model_without_the_matrices() -> None:
    batch = mixed_batch()
    learner = make_learner(loss=LossConfig("grpo", kl_coef=0.1), lora=LORA)
    first = make_learner().logprobs(batch)
    assert learner.modules.reference_model is None, "a second copy is not needed"
    for seed in range(3):
        learner.update(mixed_batch(seed))
    assert np.array_equal(learner.reference(batch), first)
    assert np.abs(learner.logprobs(batch) - first).max() > 1e-2, "the matrices stayed switched off"


def test_gradients_do_not_depend_on_the_cut_nor_on_checkpointing() -> None:
    """Rule 16."""

    def found(**settings: Any) -> dict[str, Any]:
        learner = make_learner(learning_rate=0.0, clip_norm=None, lora=LORA, **settings)
        with torch.no_grad():
            for name, p in learner.model.named_parameters():
                if "lora_B" in name:
                    p.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        return gradient(mixed_batch(), learner)

    expected = found()
    assert_same(found(max_tokens_per_microbatch=1), expected)
    assert_same(found(layout="padded"), expected)
    assert_same(found(gradient_checkpointing=True), expected)


def test_resuming_from_a_checkpoint_gives_the_same_bits(tmp_path: Path) -> None:
    """Rule 35."""
    batches = [mixed_batch(seed) for seed in range(4)]
    whole, other = make_learner(lora=LORA), make_learner(lora=LORA)
    for number, batch in enumerate(batches):
        whole.update(batch)
        if number == 1:
            whole.save(tmp_path)
    other.load(tmp_path)
    for batch in batches[2:]:
        other.update(batch)
    assert_same(state(other), state(whole), 0.0)
    assert differ(weights(whole), weights(make_learner())) > 1e-2


def test_an_export_is_the_merged_model(tmp_path: Path) -> None:
    learner = make_learner(lora=LORA)
    learner.update(mixed_batch())
    learner.export(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert torch.allclose(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(learner.model), atol=1e-4
    )


def test_the_first_matrices_are_always_the_same_and_leave_the_generator_alone() -> None:
    """Rule 34: they are drawn from torch's global generator, which must not notice."""
    models = [tiny(), tiny()]
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one = add_lora(models[0], LORA)
    assert torch.equal(torch.rand(3), expected)
    other = dict(add_lora(models[1], LORA).named_parameters())
    assert all(torch.equal(p, other[name]) for name, p in one.named_parameters())


def test_a_critic_of_either_kind_goes_with_it() -> None:
    batch = mixed_batch(also=("returns", "values"))
    for critic in ("shared", "separate"):
        learner = make_learner(lora=LORA, critic=critic)
        learner.update(batch)
        learner.update(batch)
        assert learner.values(batch)[0].any()
        assert differ(weights(learner), weights(make_learner())) > 1e-3


@pytest.mark.parametrize("targets", [("lm_head",), ("embed_tokens", "q_proj")])
def test_tied_weights_cannot_be_trained_apart(targets: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=f"LoRA cannot train .*{targets[0]}: embeddings"):
        add_lora(tiny(), LoraSettings(targets=targets))


def test_an_untied_head_can_be_trained() -> None:
    learner = make_learner(tiny(tie_word_embeddings=False), lora=LoraSettings(targets=("lm_head",)))
    learner.update(mixed_batch())
    learner.update(mixed_batch())
    merged = tiny(tie_word_embeddings=False)
    merged.load_state_dict(weights(learner))
    assert torch.allclose(logits(merged), logits(learner.model), atol=1e-4)


def test_unsupported_lora_settings_are_refused() -> None:
    with pytest.raises(UsageError, match="rank >= 1"):
        LoraSettings(rank=0)
    with pytest.raises(UsageError, match="dropout must be 0"):
        LoraSettings(dropout=0.1)
    with pytest.raises(UsageError, match="LoRA cannot be added to LlamaForCausalLM: .*nowhere"):
        add_lora(tiny(), LoraSettings(targets=("nowhere",)))
