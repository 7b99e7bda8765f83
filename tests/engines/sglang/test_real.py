"""A real SGLang server: what only SGLang has; `test_contract.py` tests what all engines share.

Run by `make test-sglang`; skipped without ROLLGYM_TEST_SGLANG.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch_models import move_some, plain_logprobs

from rollgym.core.errors import UsageError
from rollgym.engines.base import GenerateRequest, Generation, Sampling, WeightSource
from rollgym.engines.embedded.model import read_module
from rollgym.engines.servers.weight_delta import DeltaEncoder
from rollgym.engines.sglang import ServerOptions, SglangEngine, launch
from rollgym.engines.sglang.weights import SglangWeightSender

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPT = (7, 8, 9, 10)
DELAYS = (0.3, 0.1, 0.6, 0.05, 1.0, 0.02, 2.0)
"""Seconds after which replies are in flight; one of them fits this machine."""
Model = Callable[[int], Path]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(real_options: ServerOptions, real_model: Model, runner: asyncio.Runner) -> Iterator[SglangEngine]:
    engine = launch(real_model(0), replace(real_options, weight_delta=True))
    yield engine
    server = engine.server
    assert server is not None
    runner.run(engine.close())
    assert not server.alive


@pytest.fixture
def run(engine: SglangEngine, runner: asyncio.Runner) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return runner.run(asyncio.wait_for(work, 600))

    return run


Run = Callable[[Coroutine[Any, Any, Any]], Any]


def ask(name: str = "r", **sampling: Any) -> GenerateRequest:
    settings = Sampling(**{"max_tokens": 24, **sampling})
    return GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=settings, session=name)


def gap(folder: Path, made: Generation, temperature: float = 1.0) -> float:
    """The largest difference to the log-probs of a plain transformers forward."""
    plain = plain_logprobs(read_module(folder), PROMPT + made.token_ids, len(PROMPT), temperature)
    return max(abs(a - b) for a, b in zip(plain, made.logprobs, strict=True))


def tensors(folder: Path) -> WeightSource:
    return WeightSource(tensors=dict(read_module(folder).named_parameters()))


async def to(engine: SglangEngine, weights: WeightSource) -> int:
    """Update to the next version."""
    await engine.update_weights(engine.version + 1, weights)
    return engine.version


def test_greedy_takes_the_most_likely_token_with_log_prob_zero(
    engine: SglangEngine, run: Run, real_model: Model
) -> None:
    run(to(engine, WeightSource(path=real_model(0))))
    made = run(engine.generate(ask(temperature=0.0)))
    assert made.logprobs == (0.0,) * 24
    model: Any = read_module(real_model(0))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + made.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(made.token_ids)
    body = {"input_ids": list(PROMPT), "sampling_params": {"temperature": 0.0, "max_new_tokens": 24}}
    body["sampling_params"]["ignore_eos"] = True  # type: ignore[index]
    url, asked = f"{engine._servers.front.url}/generate", {**body, "return_logprob": True}
    assert httpx.post(url, json=asked, timeout=60).status_code == 401, "the server has a key"
    raw = httpx.post(url, json=asked, headers=engine._servers.front.headers, timeout=60).json()
    said = [one[0] for one in raw["meta_info"]["output_token_logprobs"]]
    plain = plain_logprobs(model, PROMPT + made.token_ids, len(PROMPT))
    assert raw["output_ids"] == list(made.token_ids)
    assert max(abs(a - b) for a, b in zip(plain, said, strict=True)) < 1e-4


@pytest.mark.parametrize("route", SglangWeightSender.routes)
def test_every_route_brings_the_new_weights(
    engine: SglangEngine, run: Run, real_model: Model, monkeypatch: pytest.MonkeyPatch, route: Any
) -> None:
    run(to(engine, WeightSource(path=real_model(0))))
    assert gap(real_model(1), run(engine.generate(ask()))) > 0.1
    sender = SglangWeightSender(engine.model, route, bucket=100_000, host=None, timeout=120.0)
    monkeypatch.setattr(engine, "_sender", sender)
    for seed in (1, 2):  # twice: a group is met once
        version = run(to(engine, tensors(real_model(seed))))
        made = run(engine.generate(ask()))
        assert made.version_spans == ((version, 24),)
        assert gap(real_model(seed), made) < 1e-4
    run(sender.close(engine._servers))


@pytest.mark.parametrize("route", ["tensor", "group"])
def test_deltas_lead_to_the_weights_of_full_updates(
    engine: SglangEngine, run: Run, real_model: Model, monkeypatch: pytest.MonkeyPatch, route: Any
) -> None:
    deltas = DeltaEncoder(full_every=3)
    sender = SglangWeightSender(engine.model, route, bucket=100_000, host=None, timeout=120.0, deltas=deltas)
    monkeypatch.setattr(engine, "_sender", sender)
    assert engine._servers.deltas
    moving = read_module(real_model(1))
    sent = []
    for number in range(5):
        version = run(to(engine, WeightSource(tensors=dict(moving.named_parameters()))))
        made = run(engine.generate(ask()))
        assert made.version_spans == ((version, 24),)
        plain = plain_logprobs(moving, PROMPT + made.token_ids, len(PROMPT))
        assert max(abs(a - b) for a, b in zip(plain, made.logprobs, strict=True)) < 1e-4
        sent.append(engine.weight_bytes_sent or 0)
        move_some(moving, number)
    run(sender.close(engine._servers))
    print(f"{route}: bytes of each update {sent}")
    most = 10 if route == "tensor" else 1  # a broadcast has whole tensors, those that changed
    assert all(most * sent[number] < sent[0] for number in (1, 2, 4))
    assert sent[3] == pytest.approx(sent[0], rel=0.1)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_newer_servers_update_weights_during_replies(
    engine: SglangEngine, run: Run, real_model: Model, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    try:
        engine.compat.check(mode, "it")
    except UsageError as older:
        pytest.skip(str(older))
    monkeypatch.setattr(engine, "_mode", mode)

    async def change(delay: float) -> Generation:
        reply = asyncio.create_task(engine.generate(ask("long", max_tokens=240)))
        await asyncio.sleep(delay)
        await to(engine, tensors(real_model(1)))
        return await reply

    for delay in DELAYS:
        old = run(to(engine, WeightSource(path=real_model(0))))
        made = run(change(delay))
        if len(made.version_spans) > 1:
            break
    assert [version for version, _ in made.version_spans] == [old, old + 1]
    assert len(made.token_ids) == 240
    run(asyncio.sleep(0.5))
    assert not any(worker.state.stale for worker in engine._servers.workers)
    assert gap(real_model(1), run(engine.generate(ask()))) < 1e-4


def test_memory_is_released_and_resumed_in_any_order(
    engine: SglangEngine, run: Run, real_model: Model
) -> None:
    async def play() -> None:
        reply = asyncio.create_task(engine.generate(ask("long", max_tokens=200)))
        await asyncio.sleep(0.3)
        await engine.resume_memory()  # nothing was given up: nothing is sent
        await engine.sleep()
        await engine.sleep(["kv_cache"])
        await engine.resume_memory(["weights"])
        await engine.resume_memory(["weights"])
        await to(engine, tensors(real_model(1)))
        await engine.resume_memory()
        await engine.resume()
        assert len((await reply).token_ids) == 200

    run(play())
    assert gap(real_model(1), run(engine.generate(ask()))) < 1e-4
