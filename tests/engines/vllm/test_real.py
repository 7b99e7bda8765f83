"""A real vLLM server: what only vLLM has; `test_contract.py` tests what all engines share.

Run by `make test-vllm`; skipped without ROLLGYM_TEST_VLLM.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch_models import move_some, plain_logprobs

from rollgym.core.errors import AgentError
from rollgym.engines.base import GenerateRequest, Generation, Sampling, WeightSource
from rollgym.engines.embedded.model import read_module
from rollgym.engines.servers.weight_delta import DeltaEncoder
from rollgym.engines.vllm import VllmEngine, launch
from rollgym.engines.vllm.weights import VllmWeightSender

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPT = (7, 8, 9, 10)
DELAYS = (0.3, 0.1, 0.6, 0.05, 1.0, 0.02, 2.0)
Model = Callable[[int], Path]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(
    server_options: Callable[[str], Any], real_model: Model, runner: asyncio.Runner
) -> Iterator[VllmEngine]:
    engine = launch(real_model(0), replace(server_options("vllm"), weight_delta=True))
    yield engine
    runner.run(engine.close())


def ask(**sampling: Any) -> GenerateRequest:
    settings = Sampling(**{"max_tokens": 24, **sampling})
    return GenerateRequest(request_id="r", prompt_ids=PROMPT, sampling=settings)


def gap(folder: Path, made: Generation) -> float:
    plain = plain_logprobs(read_module(folder), PROMPT + made.token_ids, len(PROMPT))
    return max(abs(a - b) for a, b in zip(plain, made.logprobs, strict=True))


def tensors(folder: Path) -> WeightSource:
    return WeightSource(tensors=dict(read_module(folder).named_parameters()))


@pytest.mark.parametrize("route", VllmWeightSender.routes)
def test_every_route_brings_the_new_weights(
    engine: VllmEngine,
    runner: asyncio.Runner,
    real_model: Model,
    monkeypatch: pytest.MonkeyPatch,
    route: Any,
) -> None:
    sender = VllmWeightSender(engine.model, route, bucket=100_000, host=None, timeout=120.0)
    monkeypatch.setattr(engine, "_sender", sender)
    for seed in (0, 1, 2):  # several: a group is met once
        runner.run(engine.update_weights(engine.version + 1, tensors(real_model(seed))))
        made = runner.run(engine.generate(ask()))
        assert made.version_spans == ((engine.version, 24),)
        assert gap(real_model(seed), made) < 1e-4
    runner.run(sender.close(engine._servers))


@pytest.mark.parametrize("route", ["tensor", "group"])
def test_deltas_lead_to_the_weights_of_full_updates(
    engine: VllmEngine,
    runner: asyncio.Runner,
    real_model: Model,
    monkeypatch: pytest.MonkeyPatch,
    route: Any,
) -> None:
    deltas = DeltaEncoder(full_every=3)
    sender = VllmWeightSender(engine.model, route, bucket=100_000, host=None, timeout=120.0, deltas=deltas)
    monkeypatch.setattr(engine, "_sender", sender)
    assert engine._servers.deltas
    moving = read_module(real_model(1))
    sent = []
    for number in range(5):
        weights = WeightSource(tensors=dict(moving.named_parameters()))
        runner.run(engine.update_weights(engine.version + 1, weights))
        made = runner.run(engine.generate(ask()))
        assert made.version_spans == ((engine.version, 24),)
        plain = plain_logprobs(moving, PROMPT + made.token_ids, len(PROMPT))
        assert max(abs(a - b) for a, b in zip(plain, made.logprobs, strict=True)) < 1e-4
        sent.append(engine.weight_bytes_sent or 0)
        move_some(moving, number)
    runner.run(sender.close(engine._servers))
    print(f"{route}: bytes of each update {sent}")
    assert all(10 * sent[number] < sent[0] for number in (1, 2, 4))
    assert sent[3] == pytest.approx(sent[0], rel=0.1)


def test_a_delta_to_weights_that_the_server_does_not_have_is_sent_again_in_full(
    engine: VllmEngine, runner: asyncio.Runner, real_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas = DeltaEncoder(full_every=9)
    sender = VllmWeightSender(engine.model, "tensor", bucket=100_000, host=None, timeout=120.0, deltas=deltas)
    monkeypatch.setattr(engine, "_sender", sender)
    moving = read_module(real_model(1))
    sent = []
    for number in range(2):
        weights = WeightSource(tensors=dict(moving.named_parameters()))
        runner.run(engine.update_weights(engine.version + 1, weights))
        sent.append(engine.weight_bytes_sent or 0)
        move_some(moving, number)
        deltas._stamp = "another"
    made = runner.run(engine.generate(ask()))
    move_some(moving, 1, back=True)
    plain = plain_logprobs(moving, PROMPT + made.token_ids, len(PROMPT))
    assert max(abs(a - b) for a, b in zip(plain, made.logprobs, strict=True)) < 1e-4
    assert sent[1] == pytest.approx(sent[0], rel=0.1)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_replies_continue_after_an_update_in_both_modes(
    engine: VllmEngine,
    runner: asyncio.Runner,
    real_model: Model,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    monkeypatch.setattr(engine, "_mode", mode)

    async def change(delay: float) -> Generation:
        reply = asyncio.create_task(engine.generate(ask(max_tokens=240)))
        await asyncio.sleep(delay)
        await engine.update_weights(engine.version + 1, tensors(real_model(1)))
        return await reply

    for delay in DELAYS:
        runner.run(engine.update_weights(engine.version + 1, tensors(real_model(0))))
        old = engine.version
        made = runner.run(change(delay))
        if len(made.version_spans) > 1:
            break
    assert [version for version, _ in made.version_spans] == [old, old + 1]
    assert len(made.token_ids) == 240
    cut = made.version_spans[0][1]
    plain = plain_logprobs(read_module(real_model(1)), PROMPT + made.token_ids, len(PROMPT))
    assert max(abs(a - b) for a, b in zip(plain[cut:], made.logprobs[cut:], strict=True)) < 1e-4


def test_an_update_that_fails_halfway_generates_nothing_until_one_succeeds(
    engine: VllmEngine, runner: asyncio.Runner, real_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = VllmWeightSender(engine.model, "tensor", bucket=100_000, host=None, timeout=120.0)
    monkeypatch.setattr(engine, "_sender", sender)
    pack, packed = sender.pack, []

    def cut_the_second(bucket: Any) -> str:
        packed.append(bucket)
        return pack(bucket) if len(packed) != 2 else pack(bucket)[:-8]

    monkeypatch.setattr(sender, "pack", cut_the_second)
    before = engine.version
    with pytest.raises(AgentError, match="answered 500"):
        runner.run(engine.update_weights(before + 1, tensors(real_model(1))))
    assert engine.version == before
    with pytest.raises(AgentError, match="weights of two versions"):
        runner.run(engine.generate(ask()))
    runner.run(engine.update_weights(before + 1, tensors(real_model(2))))
    assert gap(real_model(2), runner.run(engine.generate(ask()))) < 1e-4


def test_no_route_but_health_answers_without_the_key(engine: VllmEngine) -> None:
    url, headers = engine._servers.front.url, engine._servers.front.headers
    assert url.startswith("http://127.0.0.1:")
    with httpx.Client(trust_env=False, timeout=60) as client:
        assert client.get(f"{url}/health").status_code == 200
        for path in ("/version", "/v1/models", "/weight_info", "/metrics"):
            assert client.get(url + path).status_code == 401
            assert client.get(url + path, headers={"Authorization": "Bearer wrong"}).status_code == 401
            assert client.get(url + path, headers=headers).status_code == 200
        for path in ("/collective_rpc", "/pause", "/start_weight_update", "/inference/v1/generate"):
            assert client.post(url + path, json={"method": "reset_weights"}).status_code == 401
