"""A real SGLang server: sampling, weight updates, and recovery when it dies.

Run by `make test-sglang`; skipped without ROLLGYM_TEST_SGLANG.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch_models import plain_logprobs

from rollgym.core.errors import EngineLost, UsageError
from rollgym.engines.base import BadRequest, GenerateRequest, Generation, Sampling, WeightSource
from rollgym.engines.embedded.model import read_module
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
    engine = launch(real_model(0), real_options)
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


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_the_trainer(
    engine: SglangEngine, run: Run, real_model: Model, temperature: float
) -> None:
    run(to(engine, WeightSource(path=real_model(0))))
    made = run(engine.generate(ask(temperature=temperature)))
    assert len(made.token_ids) == 24
    assert made.finish_reason == "length"
    assert made.version_spans == ((engine.version, 24),)
    assert gap(real_model(0), made, temperature) < 1e-4


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


def test_a_stop_id_ends_a_reply_and_an_eos_does_not(
    engine: SglangEngine, run: Run, real_model: Model
) -> None:
    run(to(engine, WeightSource(path=real_model(0))))
    first = run(engine.generate(ask(temperature=0.0)))
    stop = first.token_ids[5]
    made = run(engine.generate(ask(temperature=0.0, stop_ids=(stop,))))
    assert made.finish_reason == "stop"
    assert made.token_ids == first.token_ids[: first.token_ids.index(stop) + 1]


def test_many_replies_at_once_are_each_right(engine: SglangEngine, run: Run, real_model: Model) -> None:
    run(to(engine, WeightSource(path=real_model(0))))

    async def many() -> list[Generation]:
        return list(await asyncio.gather(*(engine.generate(ask(f"m{i}")) for i in range(24))))

    made = run(many())
    assert max(gap(real_model(0), one) for one in made) < 1e-4
    assert len({one.token_ids for one in made}) > 1


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


def test_in_flight_replies_continue_with_new_weights(
    engine: SglangEngine, run: Run, real_model: Model
) -> None:
    async def change(delay: float) -> list[Generation]:
        replies = [asyncio.create_task(engine.generate(ask(f"w{i}", max_tokens=200))) for i in range(4)]
        await asyncio.sleep(delay)
        await to(engine, tensors(real_model(1)))
        return list(await asyncio.gather(*replies))

    for delay in DELAYS:
        old = run(to(engine, WeightSource(path=real_model(0))))
        found = run(change(delay))
        if all(len(made.version_spans) > 1 for made in found):
            break
    for made in found:
        assert len(made.token_ids) == 200
        counts = dict(made.version_spans)
        assert set(counts) == {old, old + 1}
        split = counts[old]
        for seed, part in ((0, slice(None, split)), (1, slice(split, None))):
            plain = plain_logprobs(read_module(real_model(seed)), PROMPT + made.token_ids, len(PROMPT))
            pairs = zip(plain[part], made.logprobs[part], strict=True)
            assert max(abs(a - b) for a, b in pairs) < 1e-4


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


def test_abort_cancel_and_pause(engine: SglangEngine, run: Run) -> None:
    async def play() -> None:
        for delay in DELAYS:
            reply = asyncio.create_task(engine.generate(ask("gone", max_tokens=240)))
            other = asyncio.create_task(engine.generate(ask("gone-on", max_tokens=60)))
            await asyncio.sleep(delay)
            await engine.abort(["gone", "nobody"])
            made = await reply
            if 0 < len(made.token_ids) < 240:
                break
            await other
        assert made.finish_reason == "aborted"
        assert 0 < len(made.token_ids) < 240
        assert (await other).finish_reason == "length"
        cancelled = asyncio.create_task(engine.generate(ask("cut", max_tokens=240)))
        await asyncio.sleep(0.02)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await engine.pause()
        waiting = asyncio.create_task(engine.generate(ask("held")))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await engine.resume()
        assert (await waiting).finish_reason == "length"

    run(play())


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


def test_wrong_weights_are_rejected_and_the_old_ones_stay(
    engine: SglangEngine, run: Run, real_model: Model, tmp_path: Path
) -> None:
    version = run(to(engine, WeightSource(path=real_model(0))))
    good = dict(read_module(real_model(1)).named_parameters())
    name = next(iter(good))
    for bad in ({**good, "more": good[name]}, {name: good[name]}, {**good, name: good[name][:-1]}):
        with pytest.raises(UsageError):
            run(engine.update_weights(version + 1, WeightSource(tensors=bad)))
    with pytest.raises(UsageError, match="the folder does not exist"):
        run(engine.update_weights(version + 1, WeightSource(path=tmp_path / "none")))
    assert engine.version == version
    assert gap(real_model(0), run(engine.generate(ask()))) < 1e-4


def test_an_id_that_would_kill_the_server_does_not_reach_it(engine: SglangEngine, run: Run) -> None:
    request = GenerateRequest(request_id="bad", prompt_ids=(engine.vocabulary,))
    with pytest.raises(BadRequest):
        run(engine.generate(request))
    longest = (5,) * (engine.context_length - 1)
    made = run(engine.generate(GenerateRequest(request_id="long", prompt_ids=longest)))
    assert len(made.token_ids) == 1


def test_a_killed_server_restarts_with_the_last_weights(
    engine: SglangEngine, run: Run, real_model: Model
) -> None:
    server = engine.server
    assert server is not None
    live = read_module(real_model(1))
    version = run(to(engine, WeightSource(tensors=dict(live.named_parameters()))))
    with torch.no_grad():
        for parameter in live.parameters():  # as a learner goes on with its own
            parameter.add_(1.0)

    async def kill() -> None:
        # Many: a quick machine is done with a single one before it can be killed.
        asked = [engine.generate(ask(f"lost {i}", max_tokens=240)) for i in range(64)]
        replies = asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.2)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        ended = {type(one) for one in await replies}
        assert EngineLost in ended
        assert ended <= {EngineLost, Generation}

    run(kill())
    made = run(engine.generate(ask()))
    assert server.starts == 2
    assert made.version_spans == ((version, 24),)
    assert gap(real_model(1), made) < 1e-4
