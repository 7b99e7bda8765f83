"""The engine for tests keeps the protocol, so that what passes with it means something."""

import asyncio
from typing import Any

import pytest

from rollgym.core.errors import AgentError
from rollgym.engines.base import BadRequest, Engine, GenerateRequest, Generation, Sampling, WeightSource
from rollgym.testing import ScriptedEngine


def request(name: str = "r", prompt: tuple[int, ...] = (1, 2), **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=prompt, sampling=Sampling(**sampling))


def answer(engine: ScriptedEngine, request_: GenerateRequest) -> Generation:
    return asyncio.run(engine.generate(request_))


def test_it_is_an_engine():
    engine: Engine = ScriptedEngine([1], version=2, context_length=9)
    assert (engine.version, engine.context_length) == (2, 9)


def test_it_says_what_the_script_says_and_stops_where_it_must():
    engine = ScriptedEngine(lambda request_: [*request_.prompt_ids, 7, 8, 9], logprob=-2.0, version=4)
    generation = answer(engine, request(stop_ids=(8,)))
    assert (generation.token_ids, generation.finish_reason) == ((1, 2, 7, 8), "stop")
    assert generation.logprobs == (-2.0,) * 4
    assert (generation.version, generation.version_spans) == (4, ((4, 4),))
    assert answer(engine, request(max_tokens=3)).token_ids == (1, 2, 7)
    assert answer(engine, request(max_tokens=3)).finish_reason == "length"


def test_it_refuses_what_an_engine_refuses():
    engine = ScriptedEngine([1], context_length=10)
    with pytest.raises(BadRequest, match="The request has no prompt ids"):
        answer(engine, request(prompt=()))
    with pytest.raises(BadRequest, match="A prompt of 10 ids leaves no room"):
        answer(engine, request(prompt=(1,) * 10))
    asyncio.run(engine.close())
    with pytest.raises(AgentError, match="closed"):
        answer(engine, request())


def test_a_reply_ends_with_the_context():
    generation = answer(ScriptedEngine([1, 2, 3], context_length=4), request(max_tokens=9))
    assert (generation.token_ids, generation.finish_reason) == ((1, 2), "length")


def test_an_id_can_be_used_once_at_a_time():
    async def play() -> None:
        engine = ScriptedEngine([1, 2])
        await asyncio.gather(engine.generate(request("a")), engine.generate(request("a")))

    with pytest.raises(BadRequest, match="Request id 'a' is already in use"):
        asyncio.run(play())


def test_a_pause_holds_replies_and_new_weights_count_from_the_next_token():
    engine = ScriptedEngine([5] * 6)

    async def play() -> Generation:
        task = asyncio.create_task(engine.generate(request()))
        for _ in range(3):
            await asyncio.sleep(0)
        await engine.pause()
        for _ in range(9):
            await asyncio.sleep(0)
        assert not task.done()
        await engine.update_weights(1, WeightSource(tensors={}))
        await engine.resume()
        return await task

    generation = asyncio.run(play())
    assert [version for version, _ in generation.version_spans] == [0, 1]
    assert generation.version == 0
    assert len(generation.token_ids) == 6


def test_abort_returns_what_there_is_and_ignores_unknown_ids():
    engine = ScriptedEngine([5] * 50)

    async def play() -> Generation:
        task = asyncio.create_task(engine.generate(request("a")))
        for _ in range(5):
            await asyncio.sleep(0)
        await engine.abort(["nobody", "a"])
        return await task

    generation = asyncio.run(play())
    assert generation.finish_reason == "aborted"
    assert 0 < len(generation.token_ids) < 50
    assert answer(engine, request("a")).finish_reason == "length"


def test_close_fails_what_waits():
    engine = ScriptedEngine([5] * 50)

    async def play() -> None:
        await engine.pause()
        task = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        await engine.close()
        await task

    with pytest.raises(AgentError, match="was closed"):
        asyncio.run(play())
