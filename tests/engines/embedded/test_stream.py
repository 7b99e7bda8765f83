"""Tokens of the embedded engine as they are sampled."""

import asyncio
from typing import Any

import pytest
from torch_models import make_engine, make_model, prompt, request

from rollgym.core.errors import AgentError
from rollgym.engines.base import WeightSource, as_engine
from rollgym.engines.router import RoutedEngine
from rollgym.testing import ScriptedEngine


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(context=512)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


def test_a_stream_has_the_tokens_of_a_plain_reply_in_order_and_before_its_end(model: Any) -> None:
    async def work() -> None:
        engine = make_engine(model)
        requests = [request(str(n), prompt(n, 20 + n), f"s{n}", max_tokens=30, seed=n) for n in range(6)]
        plain = [await engine.generate(each) for each in requests]
        tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
        ended: dict[str, int] = {}

        async def stream(each: Any) -> Any:
            made = await engine.stream(each, tokens[each.request_id].append)
            ended[each.request_id] = len(tokens[each.request_id])
            return made

        streamed = await asyncio.gather(*(stream(each) for each in requests))
        for before, after, each in zip(plain, streamed, requests, strict=True):
            assert after.token_ids == before.token_ids
            assert after.logprobs == before.logprobs
            assert tuple(tokens[each.request_id]) == before.token_ids
            assert ended[each.request_id] == len(before.token_ids)
        await engine.close()

    run(work())


def test_a_token_is_reported_once_though_its_reply_is_preempted_or_computed_again(model: Any) -> None:
    async def work() -> None:
        engine = make_engine(model, cache_tokens=600, max_batch=4)
        requests = [request(str(n), prompt(n, 60 + n), "", max_tokens=200, seed=n) for n in range(4)]
        tokens: list[list[int]] = [[] for _ in requests]
        tasks = [
            asyncio.create_task(engine.stream(each, tokens[n].append)) for n, each in enumerate(requests)
        ]
        while not any(len(ids) > 20 for ids in tokens):
            await asyncio.sleep(0.001)
        await engine.update_weights(1, WeightSource(tensors=model.state_dict()))
        made = await asyncio.gather(*tasks)
        assert [tuple(ids) for ids in tokens] == [each.token_ids for each in made]
        assert (await engine.stats()).preempted > 0
        await engine.close()

    run(work())


def test_tokens_arrive_while_the_reply_runs_and_none_after_a_cancelled_call(model: Any) -> None:
    async def work() -> None:
        engine = make_engine(model)
        tokens: list[int] = []
        task = asyncio.create_task(
            engine.stream(request("1", prompt(0, 20), "", max_tokens=400), tokens.append)
        )
        while len(tokens) < 5:
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.stats()  # the engine's thread has seen the abort
        await asyncio.sleep(0)
        count = len(tokens)
        await engine.generate(request("2", prompt(0, 20), "", max_tokens=20))
        assert len(tokens) == count < 400
        await engine.close()

    run(work())


def test_a_router_streams_from_the_replica_of_the_session(model: Any) -> None:
    async def work() -> None:
        router = RoutedEngine([make_engine(model), make_engine(model)])
        tokens: list[int] = []
        made = await router.stream(request("1", prompt(0, 20), "s", max_tokens=9), tokens.append)
        assert tuple(tokens) == made.token_ids
        assert router.loads == (0, 0)
        await router.close()
        with pytest.raises(AgentError):
            await router.stream(request("2", prompt(0, 20), "s", max_tokens=9), tokens.append)

    run(work())


def test_an_engine_without_streams_replies_as_ever() -> None:
    class Plain:
        version, context_length = 0, 100

        def __init__(self) -> None:
            self.generate = ScriptedEngine([5, 6, 7]).generate

    async def work() -> None:
        tokens: list[int] = []
        made = await as_engine(Plain()).stream(request("1", (1, 2), "", max_tokens=9), tokens.append)
        assert (made.token_ids, tokens) == ((5, 6, 7), [])

    run(work())
