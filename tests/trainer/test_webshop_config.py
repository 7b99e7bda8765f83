"""The shipped WebShop configs train one step: the small one as it is, the large one with a small model."""

import json
from pathlib import Path
from typing import Any

import pytest
from training import fast_versions, lines

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("tantivy")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from rollgym.trainer.main import run_training  # noqa: E402

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FEW = [
    "stop.steps=1",
    "evaluation.episodes=2",
    "rollout.groups=2",
    "rollout.group_size=2",
    "learner.threads=1",
]


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Train a shipped config; returns the run's folder."""
    monkeypatch.setenv("ROLLGYM_CACHE", str(tmp_path / "cache"))
    fast_versions(monkeypatch)

    def run(name: str, *words: str) -> Path:
        folder = tmp_path / name
        run_training(name, [*FEW, *words], folder, resume=False, imitate_only=False, plain=True)
        return folder

    return run


def stand_in(folder: Path) -> Path:
    """A tiny Qwen2 model with a byte tokenizer, its special tokens and its chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelling = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = decoders.ByteLevel()
    spelling.add_special_tokens(MARKS)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": len(letters) + 2}
    config = Qwen2Config(
        **sizes, **heads, **ends, vocab_size=len(letters) + len(MARKS), max_position_embeddings=8192
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    spelling.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": MARKS[2],
        "pad_token": MARKS[0],
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    assert AutoTokenizer.from_pretrained(folder).decode([258]) == MARKS[2]
    return folder


@pytest.mark.slow
def test_the_small_config_trains_one_step(trained: Any) -> None:
    words = ["envs.0.kwargs.shop=simple:200", "warm_start.episodes=100", "warm_start.epochs=1"]
    folder = trained("webshop-grpo", *words)
    assert len(lines(folder / "metrics.jsonl")) == 1
    assert [line["success"] for line in lines(folder / "episodes.jsonl")] != []


@pytest.mark.slow
def test_the_qwen_config_trains_one_step_with_a_model_of_its_architecture(
    trained: Any, tmp_path: Path
) -> None:
    words = [f"model.path={stand_in(tmp_path / 'model')}", "agent.max_tokens=8", "rollout.workers=0"]
    small = ["envs.0.kwargs.shop=synthetic:50", "envs.0.kwargs.max_turns=2", "rollout.max_skipped=0"]
    folder = trained("webshop-qwen", *words, *small)
    (step,) = lines(folder / "metrics.jsonl")
    assert step["train_rollout_logprob_diff_max"] < 1e-3
    turn = lines(folder / "episodes.jsonl")[0]["turns"][0]
    assert "[SEP]" in turn["observation"]
