"""The calls to a vLLM server, and its replies: malformed ones raise typed errors."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import as_json, model_folder
from scripted_vllm import ScriptedVllm, calls, scripted_vllm, vllm_reply

from rollgym.core.errors import AgentError, EngineLost
from rollgym.engines.base import BadRequest, GenerateRequest, Sampling, WeightSource
from rollgym.engines.vllm import VllmEngine
from rollgym.engines.vllm.protocol import request_body

GENERATE = "/inference/v1/generate"


@pytest.fixture
def server() -> Iterator[ScriptedVllm]:
    with scripted_vllm() as script:
        yield script


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def engine(server: ScriptedVllm, tmp_path: Path, runner: asyncio.Runner) -> Iterator[VllmEngine]:
    engine = VllmEngine(server.url, model_folder(tmp_path / "model"), timeout=60.0, retries=0, route="disk")
    yield engine
    runner.run(engine.close())


def ask(**sampling: Any) -> GenerateRequest:
    settings = Sampling(**{"max_tokens": 4, **sampling})
    return GenerateRequest(request_id="r", prompt_ids=(3, 4), sampling=settings, session="s")


def test_a_reply(server: ScriptedVllm, engine: VllmEngine, runner: asyncio.Runner) -> None:
    made = runner.run(engine.generate(ask(top_p=0.9, stop_ids=(7,))))
    assert made.token_ids == (1, 2, 3, 4)
    assert made.logprobs == (-2.5, -3.5, -4.5, -5.5)
    assert made.version_spans == ((0, 4),)
    assert server.weights == "0", "the name of the version is set when the engine connects"
    (body,) = server.asked(GENERATE)
    assert body["token_ids"] == [3, 4]
    assert body["sampling_params"]["top_p"] == 0.9
    assert body["sampling_params"]["stop_token_ids"] == [7]
    assert runner.run(engine.stats()).prefix_hit_tokens == 1


def test_greedy_replies_have_log_prob_zero(engine: VllmEngine, runner: asyncio.Runner) -> None:
    assert runner.run(engine.generate(ask(temperature=0.0))).logprobs == (0.0,) * 4


def test_the_rest_of_a_reply_has_other_random_numbers() -> None:
    bodies = [request_body("r", [1], Sampling(seed=5), 4, position) for position in (0, 0, 3)]
    first, same, rest = (body["sampling_params"]["seed"] for body in bodies)
    assert first == same != rest
    assert 0 <= rest < 1 << 63


def change(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda reply: reply["choices"][0].update(changes)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (change(token_ids=[1, 2]), "2 token ids but 4 log-probs"),
        (change(token_ids=[1, 2, 3, 99]), "its token ids and those of its log-probs differ"),
        (change(finish_reason="error"), "its finish reason is 'error'"),
        (change(logprobs=None), "4 token ids but 0 log-probs"),
        (change(weight_versions=None), "does not report the weight version"),
        (change(weight_versions=[{"version": "0", "start": 0, "end": 3}]), "weight versions for 3"),
        (change(weight_versions=[{"version": "9", "start": 0, "end": 4}]), "weight version '9' instead of 0"),
        (change(finish_reason="stop", stop_reason="text"), "stopped a reply: text"),
        (lambda reply: reply.update(request_id="other"), "belongs to another request"),
        (lambda reply: reply.update(choices=[]), "0 choices instead of 1"),
        (lambda reply: reply["choices"][0]["logprobs"]["content"][0].update(logprob=0.5), "above 0"),
        (lambda reply: reply["choices"][0]["logprobs"]["content"][0].update(logprob=-9999.0), "NaN"),
        (change(token_ids="text"), "sent an invalid response"),
    ],
)
def test_malformed_replies_are_typed_errors(
    server: ScriptedVllm,
    engine: VllmEngine,
    runner: asyncio.Runner,
    spoil: Callable[[dict[str, Any]], None],
    says: str,
) -> None:
    def answer(body: Any) -> tuple[int, bytes]:
        reply = vllm_reply(body)
        spoil(reply)
        return as_json(reply)

    server.scripts[GENERATE] = answer
    with pytest.raises(AgentError, match=says):
        runner.run(engine.generate(ask()))


def test_a_dead_engine_process_is_a_lost_engine(
    server: ScriptedVllm, engine: VllmEngine, runner: asyncio.Runner
) -> None:
    server.scripts[GENERATE] = lambda _: (500, b'{"error": {"message": "EngineCore encountered an issue"}}')
    with pytest.raises(EngineLost, match="EngineCore encountered an issue"):
        runner.run(engine.generate(ask()))
    server.scripts[GENERATE] = lambda _: (400, b'{"error": {"message": "too long"}}')
    with pytest.raises(AgentError, match="answered 400: too long") as caught:
        runner.run(engine.generate(ask()))
    assert not isinstance(caught.value, EngineLost)


def test_bad_requests_do_not_reach_the_server(
    server: ScriptedVllm, engine: VllmEngine, runner: asyncio.Runner
) -> None:
    for ids in ((), (50,), (3,) * 40):
        with pytest.raises(BadRequest):
            runner.run(engine.generate(GenerateRequest(request_id="bad", prompt_ids=ids)))
    assert not server.asked(GENERATE)


def test_pause_and_resume(server: ScriptedVllm, engine: VllmEngine, runner: asyncio.Runner) -> None:
    runner.run(engine.pause())
    runner.run(engine.resume())
    assert calls(server) == ["/pause", "/resume"]


def test_weights_from_a_folder_reset_the_cache_before_replies_continue(
    server: ScriptedVllm, engine: VllmEngine, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._sender, "check", lambda servers, source: source)
    runner.run(engine.update_weights(7, WeightSource(path=engine.model.path)))
    assert calls(server) == ["/pause", "/reset_prefix_cache", "/resume"]
    reload = server.asked("/collective_rpc")[-1]
    assert reload == {"method": "reload_weights", "kwargs": {"weights_path": str(engine.model.path)}}
    assert server.weights == "7"
    assert runner.run(engine.generate(ask())).version == 7


def test_waking_up_restores_memory_and_the_last_weights(
    server: ScriptedVllm, engine: VllmEngine, runner: asyncio.Runner
) -> None:
    runner.run(engine.sleep())
    runner.run(engine.sleep())
    runner.run(engine.wake_up())
    # A server that has all its memory again resumes by itself: it is paused until it has its weights.
    assert calls(server) == ["/pause", "/sleep", "/wake_up", "/pause", "/reset_prefix_cache", "/resume"]
    assert [one["method"] for one in server.asked("/collective_rpc")][-1] == "reload_weights"


def test_a_server_on_a_cpu_keeps_its_cache_when_only_that_is_released(
    server: ScriptedVllm, engine: VllmEngine, runner: asyncio.Runner
) -> None:
    runner.run(engine.sleep(["kv_cache"]))
    assert calls(server) == ["/pause"]
    runner.run(engine.wake_up())
    assert runner.run(engine.generate(ask())).version == 0
