"""Gap between log-probs of engine and learner of a mixture of experts, with and without router replay.

    python benchmarks/router_replay.py
    python benchmarks/router_replay.py --families qwen3_moe --rows 16 --updates 4

A small model with random weights samples replies in an embedded engine, in float32 and in bfloat16; learners
in float32 compute the same tokens, with the experts that the engine reports and with their own, before any
update and after some updates (stale weights). Prints mean and largest difference per token in nats, the share
of choices that differ, and what recording and replay cost. About a minute on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollgym.core.routed_experts import RoutedExperts
from rollgym.engines.base import GenerateRequest, Sampling
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.trainer.data.batch import Batch, make_batch
from rollgym.trainer.data.sequences import TokenEpisode, TokenSequence
from rollgym.trainer.learner.config import LearnerConfig
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.losses.settings import LossConfig

VOCABULARY, LAYERS, EXPERTS, CHOICES = 512, 4, 32, 4
FAMILIES = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 64},
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 64},
    "deepseek_v3": {
        **{"n_routed_experts": EXPERTS, "num_local_experts": EXPERTS, "moe_intermediate_size": 64},
        **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "num_key_value_heads": 4},
        **{"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16},
        **{"v_head_dim": 32, "head_dim": 16},
    },
}


def make_model(family: str) -> Any:
    """A model whose distributions are far from uniform."""
    sizes: dict[str, Any] = {
        **{"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        **{"num_experts_per_tok": CHOICES, "max_position_embeddings": 512},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    }
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | FAMILIES[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model.float().eval()


async def sample(model: Any, rows: int, dtype: str, record: bool) -> tuple[list[TokenEpisode], float]:
    """Replies to prompts of 32 tokens, eight to each, and the CPU seconds that sampling took."""
    engine = EmbeddedEngine(model, dtype=dtype, threads=1, return_routed_experts=record)  # type: ignore[arg-type]

    async def reply(number: int) -> TokenEpisode:
        prompt = np.random.default_rng(number // 8).integers(0, VOCABULARY, 32).tolist()
        sampling = Sampling(max_tokens=64, seed=number)
        made = await engine.generate(
            GenerateRequest(request_id=str(number), prompt_ids=tuple(prompt), sampling=sampling)
        )
        ids = np.array([*prompt, *made.token_ids], dtype=np.int64)
        experts = made.routed_experts
        sequence = TokenSequence(
            ids,
            np.arange(len(prompt), len(ids)),
            experts=None if experts is None else experts.to_array(),
        )
        return TokenEpisode(
            str(number), (sequence,), np.array(made.logprobs), np.array([len(made.token_ids)])
        )

    try:
        began = time.process_time()
        episodes = await asyncio.gather(*map(reply, range(rows)))
        return list(episodes), time.process_time() - began
    finally:
        await engine.close()


def make_learner(model: Any, replay: str) -> Learner:
    """A float32 learner."""
    config = LearnerConfig(
        learning_rate=1e-5,
        device="cpu",
        dtype="float32",
        threads=1,
        router_replay=replay,  # type: ignore[arg-type]
    )
    return Learner(model, config, LossConfig("grpo"))


def batch_of(episodes: Sequence[TokenEpisode]) -> Batch:
    """Random advantages: the policy moves, and what it learns does not matter."""
    rng = np.random.default_rng(1)
    return make_batch(episodes, advantages=[np.full(one.num_tokens, rng.normal()) for one in episodes])


def gaps(model: Any, batch: Batch, updates: int) -> list[tuple[int, str, float, float, float]]:
    """(updates so far, replay, mean, largest, share of choices that differ) before and after updates.

    The policy that moves is the same in both: the one with replay.
    """
    moving = make_learner(model, "auto")
    rows = []
    for count in range(updates + 1):
        if count in (0, 1, updates):
            for replay in ("off", "auto"):
                learner = moving if replay == "auto" else make_learner(moving.model, "off")
                router_replay = moving.modules.router_replay
                assert router_replay is not None
                router_replay.take_counts()
                diff = np.abs(learner.logprobs(batch) - batch.arrays["behavior"])
                counts = router_replay.take_counts()
                differing = counts[3] / counts[2] if counts[2] else float("nan")
                rows.append((count, "on" if replay == "auto" else "off", diff.mean(), diff.max(), differing))
        if count < updates:
            moving.update(batch)
    return rows


def update_seconds(model: Any, batch: Batch, replay: str) -> float:
    """CPU seconds of the second of two updates."""
    learner = make_learner(model, replay)
    learner.update(batch)
    began = time.process_time()
    learner.update(batch)
    return time.process_time() - began


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--rows", type=int, default=32, help="number of replies (default 32)")
    parser.add_argument("--updates", type=int, default=4, help="updates for stale weights (default 4)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| model | engine | updates since | mean gap without | with replay | largest without | with |", end=""
    )
    print(" choices that differ |\n|---|---|---:|---:|---:|---:|---:|---:|")
    for family in options.families:
        model = make_model(family)
        for dtype in ("float32", "bfloat16"):
            episodes, _ = asyncio.run(sample(model, options.rows, dtype, True))
            found = gaps(model, batch_of(episodes), options.updates)
            for off, on in zip(found[::2], found[1::2], strict=True):
                figures = f"{off[2]:.2g} | {on[2]:.2g} | {off[3]:.2g} | {on[3]:.2g} | {100 * on[4]:.2f} %"
                print(f"| `{family}` | {dtype} | {off[0]} | {figures} |", flush=True)
    model = make_model(options.families[0])
    seconds = {
        record: min(asyncio.run(sample(model, options.rows, "float32", record))[1] for _ in range(2))
        for record in (False, True)
    }
    episodes, _ = asyncio.run(sample(model, options.rows, "float32", True))
    batch = batch_of(episodes)
    experts = episodes[0].sequences[0].experts
    assert experts is not None
    size = RoutedExperts.from_array(experts).bytes_per_token
    print(
        f"\n{options.families[0]}: {size} bytes a token; sampling with recording takes "
        f"{seconds[True] / seconds[False]:.2f} times as long, an update with replay "
        f"{update_seconds(model, batch, 'on') / update_seconds(model, batch, 'off'):.2f} times."
    )


if __name__ == "__main__":
    main()
