"""A mixture of experts on real servers that report the experts they chose, and a learner that replays them.

Run by `make test-sglang` and `make test-vllm`; skipped without a virtual environment of the software.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from rollgym.engines import sglang, vllm
from rollgym.engines.base import GenerateRequest, Generation, Sampling
from rollgym.trainer.data.batch import make_batch
from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence
from rollgym.trainer.learner.config import LearnerConfig
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.losses.settings import LossConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
PROMPT, NEW = tuple(range(10, 26)), 24
LAYERS, CHOICES = 2, 2


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral with random weights."""
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=CHOICES,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_learner_replays_the_experts_of_a_server(
    kind: str, server_options: Callable[[str], Any], mixture: Path
) -> None:
    if kind == "sglang":
        pytest.skip("SGLang records experts in pinned memory, which torch does not have on a CPU")
    extra = ("--skip-tokenizer-init",)
    options = replace(server_options(kind), return_routed_experts=True, max_running=8, extra=extra)
    launch = {"sglang": sglang.launch, "vllm": vllm.launch}[kind]
    engine = launch(mixture, options)

    async def ask() -> list[Generation]:
        try:
            requests = (
                GenerateRequest(
                    request_id=str(seed), prompt_ids=PROMPT, sampling=Sampling(max_tokens=NEW, seed=seed)
                )
                for seed in range(4)
            )
            return list(await asyncio.gather(*map(engine.generate, requests)))
        finally:
            await engine.close()

    episodes = []
    for number, made in enumerate(asyncio.run(ask())):
        assert made.routed_experts is not None
        experts = made.routed_experts.to_array()
        assert experts.shape == (len(PROMPT) + NEW - 1, LAYERS, CHOICES)
        ids = np.array([*PROMPT, *made.token_ids])
        sequence = TokenSequence(ids, np.arange(len(PROMPT), len(ids)), experts=experts)
        episodes.append(TokenEpisode(str(number), (sequence,), np.array(made.logprobs), np.array([NEW])))
    config = LearnerConfig(device="cpu", dtype="float32", threads=1, router_replay="on")
    learner = Learner(mixture, config, LossConfig("grpo"))
    batch = make_batch(episodes, advantages=[np.full(NEW, 1.0 - 2.0 * (n % 2)) for n in range(len(episodes))])
    metrics = learner.update(batch)
    print(f"{kind}: {metrics['router_replay_frac']=} {metrics['router_mismatch_frac']=}")
    assert metrics["router_replay_frac"] == 1.0
    assert metrics["router_mismatch_frac"] < 0.01
    assert metrics["train_rollout_logprob_diff"] < 1e-4
