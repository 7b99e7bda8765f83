"""Context parallelism: ranks that share the tokens of rows compute what one process computes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_cases import Ranks, make_any, numbers_any, train_any

from rollgym.core.errors import UsageError
from rollgym.trainer.learner.config import ParallelConfig

CONTEXT = ParallelConfig(context=2)
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "grpo", "kl_coef": 0.1, "schedule": "cosine", "weight_decay": 0.01},
    "ppo, a value head": {"loss": "ppo", "critic": "shared", "critic_rate": 3e-3, "epochs": 2},
    "gspo, a separate critic": {"loss": "gspo", "critic": "separate", "mini_batches": 2},
    "lora": {"gradient_checkpointing": True, "lora": 4, "learning_rate": 1e-2},
}


def measure(pair: Ranks, *args: Any, **options: Any) -> dict[str, float]:
    found: dict[str, float] = pair("elsewhere", "context_cases", "compare", *args, **options)
    return found


@pytest.mark.parametrize("kind", ["apart", "prefix", "short"])
@pytest.mark.parametrize("heads", [4, 2, 1])
def test_gradients_are_those_of_one_process(pair: Ranks, kind: str, heads: int) -> None:
    """Also with fewer key and value heads than ranks, which are repeated, and with a rank without tokens."""
    found = measure(pair, kind, num_key_value_heads=heads)
    assert found["logprobs"] < 1e-5
    assert found["gradients"] < 1e-5


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3", "qwen3_moe"])
def test_windows_caps_sinks_and_experts_are_those_of_one_process(pair: Ranks, family: str) -> None:
    found = measure(pair, "prefix", family)
    assert found["logprobs"] < 1e-4
    assert found["gradients"] < 1e-4


def test_logits_in_chunks_are_those_of_one_process(pair: Ranks) -> None:
    found = measure(pair, "prefix", chunks=True)
    assert found["logprobs"] < 1e-5
    assert found["gradients"] < 1e-5


def test_a_rank_keeps_half_of_the_activations(pair: Ranks) -> None:
    found = measure(pair, "prefix", num_hidden_layers=6)
    assert found["bytes"] < 0.62


def train_and_compare(
    ranks: Ranks, given: dict[str, Any], steps: int, parallel: ParallelConfig = CONTEXT, kind: str = "mixed"
) -> None:
    """Losses, gradient norms, weights and, before another update, all numbers of a learner."""
    local = make_any("single", **given)
    start = {name: tensor.numpy().copy() for name, tensor in local.weights().tensors.items()}
    expected = train_any(local, range(steps), kind)
    ranks("make", "it", "mesh", parallel=parallel, **given)
    found = ranks.try_all("train", "it", range(steps), kind)
    assert all(metrics == found[0] for metrics in found), "metrics differ between ranks"
    for mine, whole in zip(found[0], expected, strict=True):
        losses = [name for name in whole if name.endswith("loss")]
        assert [mine[name] for name in losses] == pytest.approx([whole[name] for name in losses], abs=1e-4)
        assert mine == pytest.approx(whole, rel=1e-3, abs=1e-4)
    weights, _ = ranks("weights", "it")
    last = {name: tensor.numpy() for name, tensor in local.weights().tensors.items()}
    assert max(float(np.abs(last[name] - start[name]).max()) for name in last) > 2e-3, "nothing was trained"
    assert max(float(np.abs(weights[name] - last[name]).max()) for name in last) < 1e-4
    if given.get("kl_coef"):
        for numbers in ranks.try_all("numbers", "it", 5):
            for mine, whole in zip(numbers, numbers_any(local, 5), strict=True):
                assert mine == pytest.approx(whole, abs=1e-4)
        (_, after), _ = ranks.try_all("reply_of_engine", "it")[:2]
        assert after[0] == greedy(local), "an engine with these weights samples other tokens"
    ranks("drop", "it")


def greedy(learner: Any) -> Any:
    """The reply of an engine with the weights of a learner in this process."""
    import asyncio

    from learner_cases import tiny

    from rollgym.engines.base import GenerateRequest, Sampling
    from rollgym.engines.embedded.engine import EmbeddedEngine

    async def main() -> Any:
        engine = EmbeddedEngine(tiny(9), device="cpu", threads=1)
        await engine.update_weights(3, learner.weights())
        sampling = Sampling(max_tokens=8)
        reply = await engine.generate(
            GenerateRequest(request_id="1", prompt_ids=(1, 2, 3), sampling=sampling)
        )
        await engine.close()
        return reply.token_ids

    return asyncio.run(main())


@pytest.mark.parametrize("case", CASES)
def test_updates_match_the_single_strategy(pair: Ranks, case: str) -> None:
    train_and_compare(pair, CASES[case], 30 if case == "grpo" else 3)


def test_checkpoints_load_with_and_without_a_context_group(pair: Ranks, tmp_path: Path) -> None:
    pair("make", "it", "mesh", parallel=CONTEXT)
    pair("train", "it", range(2))
    pair("save", "it", tmp_path / "ranks")
    local = make_any("single")
    local.load(tmp_path / "ranks")
    (tmp_path / "single").mkdir()
    local.save(tmp_path / "single")
    expected = train_any(local, [7])
    for folder in ("ranks", "single"):
        pair("make", "it", "mesh", parallel=CONTEXT, seed=3)
        assert pair("load", "it", tmp_path / folder) == 2
        for mine, whole in zip(pair("train", "it", [7]), expected, strict=True):
            assert mine == pytest.approx(whole, rel=1e-3, abs=1e-4)
    pair("drop", "it")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_thirty_updates_match_the_single_strategy(pair: Ranks, case: str) -> None:
    train_and_compare(pair, CASES[case], 30)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(context=2, shard=2),
        ParallelConfig(context=2, replicate=2, shard=1),
        ParallelConfig(context=2, tensor=2),
        ParallelConfig(context=4),
    ],
    ids=["context x shard", "context x replicate", "context x tensor", "context 4"],
)
def test_updates_on_four_ranks_match_the_single_strategy(four: Ranks, parallel: ParallelConfig) -> None:
    train_and_compare(four, CASES["grpo"], 30 if parallel.shard else 6, parallel)


def test_a_row_longer_than_a_micro_batch_is_shared(pair: Ranks) -> None:
    train_and_compare(pair, {"critic": "shared", "max_tokens_per_microbatch": 8}, 3, kind="one long")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"model": {"num_attention_heads": 1, "num_key_value_heads": 1}},
            "1 attention heads on a rank, which",
        ),
        ({"layout": "padded"}, "learner.parallel.context=2 requires packed rows, but rows are padded"),
    ],
)
def test_models_whose_rows_cannot_be_shared_are_refused(
    pair: Ranks, given: dict[str, Any], message: str
) -> None:
    for error in pair.try_all("make", "it", "mesh", parallel=CONTEXT, **given):
        assert isinstance(error, UsageError)
        assert message in str(error)
