"""Weights packed for oneDNN: the same replies, weight updates, and freed memory."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_models import gather, make_engine, make_model, plain_logprobs, prompt, request

from rollgym.engines.base import GenerateRequest, Generation, WeightSource
from rollgym.engines.embedded import model as model_module
from rollgym.engines.embedded.engine import EmbeddedEngine

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def pack_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_PACK", 0)


def ask(engine: EmbeddedEngine, count: int = 7) -> list[Generation]:
    requests = [request(str(n), prompt(n, 20 + 13 * n), seed=n) for n in range(count)]

    async def main() -> list[Generation]:
        return await gather(engine, requests)

    return asyncio.run(main())


def close(*engines: EmbeddedEngine) -> None:
    for engine in engines:
        asyncio.run(engine.close())


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_log_probs_are_those_of_the_plain_forward(kind: str) -> None:
    model = make_model(kind)
    engine = make_engine(model)
    assert engine._model.packed
    for n, reply in enumerate(ask(engine)):
        ids = prompt(n, 20 + 13 * n)
        plain = plain_logprobs(model, [*ids, *reply.token_ids], len(ids))
        assert reply.logprobs == pytest.approx(plain, abs=2e-5)
    close(engine)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_replies_do_not_depend_on_their_batch(kind: str) -> None:
    together, alone = make_engine(make_model(kind)), make_engine(make_model(kind), max_batch=1)
    pieces = make_engine(make_model(kind), prefill_chunk=5)
    assert together._model.packed
    replies = [[(reply.token_ids, reply.logprobs) for reply in ask(e)] for e in (together, alone, pieces)]
    assert replies[0] == replies[1] == replies[2]
    close(together, alone, pieces)


def siblings() -> list[GenerateRequest]:
    """Prompts with common prefixes of many lengths, on both sides of where attention is split."""
    shared, prompts = prompt(0, 420), []
    for number, length in enumerate((3, 100, 127, 128, 129, 200, 250, 255, 256, 257, 300, 384, 420)):
        own = [prompt(1 + n, 5 + 9 * n) for n in range(2)]
        prompts += [shared[:length], *(shared[:length] + ids for ids in own[: 1 + number % 2])]
    return [
        request(str(n), ids, f"session {n}", seed=n, max_tokens=4 + n % 9) for n, ids in enumerate(prompts)
    ]


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_shared_prefixes_change_no_bit(kind: str) -> None:
    model, requests = make_model(kind), siblings()

    async def main(at_once: bool, **options: Any) -> list[Generation]:
        engine = make_engine(model, **options)
        assert engine._model.rule.split == 128
        if at_once:
            replies = await gather(engine, requests)
        else:
            replies = []
            for one in requests:
                await engine._thread.call(lambda scheduler: scheduler.free_cache())
                replies.append(await engine.generate(one))
        await engine.close()
        return replies

    alone = asyncio.run(main(False))
    for one, reply in zip(requests, alone, strict=True):
        ids = one.prompt_ids
        plain = plain_logprobs(model, [*ids, *reply.token_ids], len(ids))
        assert reply.logprobs == pytest.approx(plain, abs=2e-5)
    bits = [(reply.token_ids, reply.logprobs) for reply in alone]
    for options in ({}, {"prefill_chunk": 60, "max_batch": 9}, {"cache_tokens": 1024}):
        together = asyncio.run(main(True, **options))
        assert [(reply.token_ids, reply.logprobs) for reply in together] == bits


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("how", ["tensors", "buckets", "folder"])
def test_new_weights_are_packed_and_only_kept_once(kind: str, how: str, tmp_path: Path) -> None:
    new = make_model(kind, seed=1)
    named: list[tuple[str, Any]] = list(new.named_parameters())
    new.save_pretrained(tmp_path)
    sources = {
        "tensors": WeightSource(tensors=dict(named)),
        "buckets": WeightSource(buckets=lambda: [named[at : at + 2] for at in range(0, len(named), 2)]),
        "folder": WeightSource(path=tmp_path),
    }
    engine, other = make_engine(make_model(kind)), make_engine(new)

    async def main() -> None:
        before = (await engine.stats()).weight_bytes
        whole = sum(parameter.nbytes for parameter in new.parameters())
        tied = new.lm_head.weight.nbytes if new.config.tie_word_embeddings else 0
        assert before == whole + tied
        await engine.update_weights(1, sources[how])
        assert (await engine.stats()).weight_bytes == before
        await engine.sleep()
        assert (await engine.stats()).weight_bytes == 0
        await engine.update_weights(2, sources[how])
        await engine.wake_up()
        assert (await engine.stats()).weight_bytes == before

    asyncio.run(main())
    assert [reply.logprobs for reply in ask(engine)] == [reply.logprobs for reply in ask(other)]
    close(engine, other)


def test_weights_can_be_unpacked() -> None:
    packed, plain = make_engine(make_model()), make_engine(make_model())
    plain._model.unpack()
    assert not plain._model.packed
    for one, other in zip(ask(packed), ask(plain), strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
    close(packed, plain)
