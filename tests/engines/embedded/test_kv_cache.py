"""KV cache limits, weight updates in place, and unsupported models."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_models import gather, make_engine, make_model, plain_logprobs, prompt, request
from transformers import AutoModelForCausalLM, MambaConfig, MptConfig

from rollgym.core.errors import AgentError, UsageError
from rollgym.engines.base import Generation, WeightSource
from rollgym.engines.embedded.kv_cache import KVCache, KVShape
from rollgym.engines.embedded.model import Model
from rollgym.engines.embedded.scheduler import BatchScheduler
from rollgym.engines.embedded.sequence import SequenceState

CPU = torch.device("cpu")


def make_scheduler(**options: int) -> BatchScheduler:
    model = Model(make_model(), device=CPU, dtype=torch.float32)
    return BatchScheduler(model, **{"max_batch": 8, "cache_tokens": 640, "prefill_chunk": 64, **options})


def submit(
    scheduler: BatchScheduler, name: str, ids: list[int], session: str = "", tokens: int = 20
) -> list[Any]:
    """Returns a list that gets the result."""
    result: list[Any] = []
    scheduler.submit(SequenceState(request(name, ids, session, max_tokens=tokens), tokens, result.append))
    return result


def test_the_cache_limit_holds_after_every_pass_and_all_replies_finish() -> None:
    scheduler = make_scheduler()
    results = []
    for number in range(60):
        ids = prompt(number, 10 + 37 * number % 300)
        results.append(submit(scheduler, str(number), ids, f"session {number % 25}", 5 + number % 60))
        for _ in range(number % 7):
            scheduler.step()
            assert scheduler.tokens <= 640
    while not scheduler.idle:
        scheduler.step()
        assert scheduler.tokens <= 640
        assert scheduler.prefixes.tokens == sum(len(node.ids) for node in scheduler.prefixes.nodes())
    assert scheduler.prefixes.evicted_sessions > 0
    assert scheduler.counts.preempted > 0
    assert [len(result) for result in results] == [1] * 60
    assert all(isinstance(result[0], Generation) for result in results)


def test_the_least_recently_used_session_is_evicted_first() -> None:
    scheduler = make_scheduler(cache_tokens=512, max_batch=1)
    for number, name in enumerate(("a", "b", "c")):
        submit(scheduler, name, prompt(number, 90), name, 2)
        while not scheduler.idle:
            scheduler.step()
    submit(scheduler, "a again", prompt(0, 100), "a", 2)
    while not scheduler.idle:
        scheduler.step()
    submit(scheduler, "large", prompt(3, 300), "", 2)
    while not scheduler.idle:
        scheduler.step()
    assert [scheduler.prefixes.has_session(name) for name in ("a", "b", "c")] == [True, False, True]


def test_sessions_are_kept_when_the_kv_cache_can_shrink() -> None:
    scheduler = make_scheduler(cache_tokens=8 * 128, prefill_chunk=1000)
    for number in range(8):
        submit(scheduler, str(number), prompt(number, 100), f"session {number}", 20)
    while not scheduler.idle:
        scheduler.step()
    assert scheduler.prefixes.sessions == 8
    assert scheduler.tokens <= 8 * 128


def test_a_session_forgotten_while_it_runs_leaves_nothing() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", prompt(0, 20), "a", 5)
    scheduler.step()
    scheduler.forget("a")
    while not scheduler.idle:
        scheduler.step()
    assert scheduler.prefixes.sessions == 0


def test_a_resized_kv_cache_keeps_its_content() -> None:
    kv_cache = KVCache(KVShape(layers=2, heads=1, dim=4, dtype=torch.float32, device=CPU), 2, 16)
    kv_cache.data.normal_(generator=torch.Generator().manual_seed(0))
    before = kv_cache.data.clone()
    kv_cache.resize(3, 32)
    assert torch.equal(kv_cache.data[:, :, :2, :, :16], before)
    assert not kv_cache.data[:, :, 2:].any()
    kv_cache.resize(1, 16)
    assert torch.equal(kv_cache.data, before[:, :, :1])


def test_new_weights_are_used_from_the_next_token_on_and_nothing_older_is() -> None:
    old, new = make_model(), make_model(seed=1)
    engine = make_engine(old)

    async def main() -> None:
        await engine.generate(request("idle", prompt(0, 30), "idle"))
        call = asyncio.ensure_future(engine.generate(request("x", prompt(1, 9), "x", max_tokens=300)))
        while (await engine.stats()).passes < 40:
            await asyncio.sleep(0)
        await engine.update_weights(7, WeightSource(tensors=new.state_dict()))
        assert engine.version == 7
        assert (await engine.stats()).sessions == 0
        reply = await call
        (first, before), (second, after) = reply.version_spans
        assert (first, second, before + after) == (0, 7, 300)
        assert reply.version == 0
        ids = [*prompt(1, 9), *reply.token_ids]
        assert reply.logprobs[:before] == pytest.approx(plain_logprobs(old, ids, 9)[:before], abs=1e-4)
        assert reply.logprobs[before:] == pytest.approx(plain_logprobs(new, ids, 9)[before:], abs=1e-4)
        await engine.close()

    asyncio.run(main())


def test_weights_come_from_a_folder_too(tmp_path: Path) -> None:
    new = make_model(seed=2)
    new.save_pretrained(tmp_path)
    ids = prompt(0, 9)

    async def main() -> None:
        engine, other = make_engine(make_model()), make_engine(str(tmp_path))
        await engine.update_weights(1, WeightSource(path=tmp_path))
        [one], [same] = await gather(engine, [request("x", ids)]), await gather(other, [request("x", ids)])
        assert (one.token_ids, one.logprobs) == (same.token_ids, same.logprobs)
        await engine.close()
        await other.close()

    asyncio.run(main())


def test_wrong_weights_change_nothing() -> None:
    engine, right = make_engine(make_model()), make_model(seed=1).state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    wrong = [
        ({**right, "model.extra": right[name]}, "no weights called model.extra"),
        ({k: v for k, v in right.items() if k != name}, f"lack {name}"),
        ({**right, name: right[name][:3]}, "shape"),
    ]

    async def main() -> None:
        [before] = await gather(engine, [request("x", prompt(0, 9))])
        for tensors, says in wrong:
            with pytest.raises(UsageError, match=says):
                await engine.update_weights(1, WeightSource(tensors=tensors))
        with pytest.raises(UsageError, match="Cannot load a model from"):
            await engine.update_weights(1, WeightSource(path=Path("nowhere")))
        assert engine.version == 0
        [after] = await gather(engine, [request("x", prompt(0, 9))])
        assert after.logprobs == before.logprobs
        del right["lm_head.weight"]  # tied: one name is enough
        await engine.update_weights(1, WeightSource(tensors=right))
        await engine.close()

    asyncio.run(main())


def test_nan_weights_fail_replies_and_leave_no_trace() -> None:
    model = make_model()
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in model.state_dict().items()}

    async def main() -> None:
        engine = make_engine(model)
        [before] = await gather(engine, [request("x", prompt(0, 9))])
        await engine.update_weights(1, WeightSource(tensors=broken))
        with pytest.raises(AgentError, match="NaN logits"):
            await engine.generate(request("x", prompt(0, 9), "x"))
        await engine.update_weights(2, WeightSource(tensors=model.state_dict()))
        [after] = await gather(engine, [request("x", prompt(0, 9), "x")])
        assert after.logprobs == before.logprobs
        await engine.close()

    asyncio.run(main())


def test_the_engine_copies_the_weights_of_its_model() -> None:
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    async def main() -> None:
        engine = make_engine(model)
        [first] = await gather(engine, [request("x", prompt(0, 9))])
        for parameter in model.parameters():
            parameter.data.zero_()
        [second] = await gather(engine, [request("x", prompt(0, 9))])
        assert second.logprobs == first.logprobs
        await engine.update_weights(1, WeightSource(tensors=before))
        assert not any(parameter.any() for parameter in model.parameters())
        await engine.close()

    asyncio.run(main())


def test_unsupported_models_are_rejected_in_one_sentence() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    mamba = AutoModelForCausalLM.from_config(MambaConfig(**sizes))
    with pytest.raises(UsageError, match="cannot run MambaForCausalLM: it has linear_attention layers"):
        make_engine(mamba)
    alibi = MptConfig(vocab_size=50, d_model=32, n_heads=4, n_layers=2)
    with pytest.raises(UsageError, match="cannot run MptForCausalLM: it has no replaceable attention"):
        make_engine(AutoModelForCausalLM.from_config(alibi))
    with pytest.raises(UsageError, match="Cannot load a model from nowhere"):
        make_engine("nowhere")
    with pytest.raises(UsageError, match="cache_tokens=100 cannot hold one conversation"):
        make_engine(make_model(), cache_tokens=100)
    with pytest.raises(UsageError, match="context_length=513 exceeds the model.s context of 512 tokens"):
        make_engine(make_model(), context_length=513)
    with pytest.raises(UsageError, match="max_batch"):
        make_engine(make_model(), max_batch=0)
