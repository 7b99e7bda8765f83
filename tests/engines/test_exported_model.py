"""SmolLM2 as a learner exports it: plain transformers, SGLang and vLLM load the folder and answer alike.

Run by `make test-sglang` and `make test-vllm`; skipped without a virtual environment of the software.
"""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollgym.core.errors import RollgymError
from rollgym.engines import sglang, vllm
from rollgym.engines.base import GenerateRequest, Generation, Sampling
from rollgym.models.zoo import model_folder
from rollgym.trainer.learner.config import LearnerConfig
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.losses.settings import LossConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
CONTEXT, NEW = 512, 12
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported weights, changed a little, with the tokenizer of the model."""
    try:
        source = model_folder("smollm2")
    except RollgymError as error:
        pytest.skip(f"SmolLM2 is not available: {error}")
    folder = tmp_path_factory.mktemp("exported") / "model"
    learner = Learner(source, LearnerConfig(device="cpu", dtype="float32", threads=1), LossConfig("grpo"))
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(1.001)
    learner.export(folder)
    for file in source.glob("*token*"):
        shutil.copy2(file, folder)
    return folder


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_server_answers_as_transformers_do(
    kind: str, server_options: Callable[[str], Any], exported: Path
) -> None:
    options = replace(server_options(kind), context_length=CONTEXT, max_running=4)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    prompt = tuple(tokenizer(text, add_special_tokens=False).input_ids)
    launch = {"sglang": sglang.launch, "vllm": vllm.launch}[kind]
    engine = launch(exported, options)

    async def ask() -> list[Generation]:
        requests = [
            GenerateRequest(
                request_id=str(temperature),
                prompt_ids=prompt,
                sampling=Sampling(max_tokens=NEW, temperature=temperature),
            )
            for temperature in (0.0, 1.0)
        ]
        try:
            return list(await asyncio.gather(*map(engine.generate, requests)))
        finally:
            await engine.close()

    greedy, sampled = asyncio.run(ask())
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    for made in (greedy, sampled):
        ids = torch.tensor([[*prompt, *made.token_ids]])
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        if made is greedy:
            assert (logprobs.max(1).values - chosen).max() < 1e-3
        else:
            gap = (chosen - torch.tensor(made.logprobs)).abs().max().item()
            print(f"{kind}: largest gap {gap:.1e}")
            assert gap < 1e-3
    print(f"{kind}: {tokenizer.decode(greedy.token_ids)}")
    assert "Paris" in tokenizer.decode(greedy.token_ids)
