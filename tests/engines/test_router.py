"""Router: session affinity, lost replicas and sleeping replicas."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from torch_models import make_model, plain_logprobs, request

from rollgym.core.errors import AgentError, EngineLost, UsageError
from rollgym.engines.base import Engine, GenerateRequest, Generation, WeightSource
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.engines.router import RoutedEngine

PROMPT = (1, 2, 3)
MODEL = make_model()
OTHER = make_model(seed=1)


class Mortal(EmbeddedEngine):
    """A real engine that can be lost, and found again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(MODEL, threads=1, **options)
        self.asked: list[str] = []
        self.dead = False
        self.found = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Generation:
        self._breathe()
        self.asked.append(request.session)
        made = await super().generate(request)
        self._breathe()
        return made

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        self._breathe()
        await super().update_weights(version, weights)

    async def reconnect(self) -> bool:
        await self.found.wait()
        self.dead = False
        return True

    def _breathe(self) -> None:
        if self.dead:
            raise EngineLost("it is dead")


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


def make(count: int) -> tuple[RoutedEngine, list[Mortal]]:
    engines = [Mortal() for _ in range(count)]
    return RoutedEngine(engines), engines


def ask(session: str, **sampling: Any) -> GenerateRequest:
    return request(f"{session}/0", PROMPT, session, **{"max_tokens": 4, **sampling})


def new_weights() -> WeightSource:
    return WeightSource(tensors=dict(OTHER.named_parameters()))


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_it_is_an_engine_and_a_session_stays_where_it_is() -> None:
    async def play() -> None:
        both, (first, second) = make(2)
        typed: Engine = both
        assert typed.version == 0
        assert typed.context_length == first.context_length
        for _ in range(3):
            await asyncio.gather(*(both.generate(ask(name)) for name in ("a", "b", "c", "d")))
        assert [len(first.asked), len(second.asked)] == [6, 6]
        assert not set(first.asked) & set(second.asked)
        assert both.loads == (0, 0)
        await both.close()

    run(play())


def test_new_sessions_go_to_the_least_loaded_replica() -> None:
    async def play() -> None:
        both, (first, second) = make(2)
        await both.pause()
        held = [asyncio.create_task(both.generate(ask(name))) for name in ("a", "b", "c")]
        await until(lambda: sum(both.loads) == 3)
        assert both.loads == (2, 1)
        held.append(asyncio.create_task(both.generate(ask("d"))))
        await until(lambda: sum(both.loads) == 4)
        assert both.loads == (2, 2)
        await both.resume()
        await asyncio.gather(*held)
        await both.forget("a")
        await both.close()

    run(play())


def test_a_lost_replica_leaves_rotation_and_its_sessions_move() -> None:
    async def play() -> None:
        both, (first, second) = make(2)
        await asyncio.gather(both.generate(ask("a")), both.generate(ask("b")))
        first.dead = True
        with pytest.raises(EngineLost, match="it is dead"):
            await both.generate(ask("a"))
        assert both.lost == {0: "it is dead"}
        assert (await both.generate(ask("a"))).finish_reason == "length"
        assert second.asked == ["b", "a"]
        await both.abort(["nobody"])
        second.dead = True
        with pytest.raises(EngineLost, match="it is dead"):
            await both.generate(ask("b"))
        with pytest.raises(EngineLost, match="All 2 replicas are lost"):
            await both.generate(ask("b"))
        await both.close()

    run(play())


def test_a_reconnected_replica_rejoins_once_it_has_the_weights() -> None:
    async def play() -> None:
        both, (first, second) = make(2)
        first.dead = True
        with pytest.raises(EngineLost):
            await both.generate(ask("a"))
        await both.update_weights(1, new_weights())  # without the one that is lost
        first.found.set()
        await until(lambda: not first.dead)
        await asyncio.sleep(0)
        assert 0 in both.lost
        await both.update_weights(2, new_weights())
        assert not both.lost
        await asyncio.gather(*(both.generate(ask(name)) for name in "bcde"))
        assert len(first.asked) == 2
        await both.close()

    run(play())


def test_a_reconnected_replica_with_the_same_weights_rejoins_at_once() -> None:
    async def play() -> None:
        both, (first, _) = make(2)
        first.dead = True
        with pytest.raises(EngineLost):
            await both.generate(ask("a"))
        first.found.set()
        await until(lambda: not both.lost)
        await both.close()

    run(play())


def test_new_weights_reach_all_replicas_with_one_version() -> None:
    async def play() -> None:
        both, engines = make(3)
        await both.update_weights(5, new_weights())
        assert [engine.version for engine in engines] == [5, 5, 5]
        assert both.version == 5
        for made in await asyncio.gather(*(both.generate(ask(name)) for name in "abc")):
            plain = plain_logprobs(OTHER, PROMPT + made.token_ids, len(PROMPT))
            assert made.version_spans == ((5, 4),)
            assert made.logprobs == pytest.approx(plain, abs=1e-4)
        await both.close()

    run(play())


def test_buckets_are_iterated_once() -> None:
    async def play() -> None:
        both, engines = make(2)
        rounds = []

        def buckets() -> Any:
            rounds.append(1)
            return [[item] for item in OTHER.named_parameters()]

        await both.update_weights(1, WeightSource(buckets=buckets))
        assert rounds == [1]
        assert [engine.version for engine in engines] == [1, 1]
        await both.close()

    run(play())


def test_a_replica_lost_in_an_update_leaves_rotation_and_wrong_weights_are_rejected() -> None:
    async def play() -> None:
        both, (first, second) = make(2)
        with pytest.raises(UsageError, match="lack"):
            await both.update_weights(1, WeightSource(tensors={}))
        assert both.version == 0
        second.dead = True
        await both.update_weights(1, new_weights())
        assert both.lost == {1: "it is dead"}
        assert both.version == first.version == 1
        await both.close()

    run(play())


def test_replicas_of_different_versions_are_named() -> None:
    engines = [Mortal(version=3), Mortal(version=4)]
    with pytest.raises(UsageError, match="different versions: replica 0 has 3, replica 1 has 4"):
        RoutedEngine(engines)
    with pytest.raises(UsageError, match="at least one"):
        RoutedEngine([])
    for engine in engines:
        asyncio.run(engine.close())


def test_a_single_replica_that_rejects_weights_is_named() -> None:
    async def play() -> None:
        other = EmbeddedEngine(make_model("llama"), threads=1)
        both = RoutedEngine([Mortal(), other])
        with pytest.raises(AgentError, match="Only replica 1 failed"):
            await both.update_weights(1, new_weights())
        await both.close()

    run(play())


def test_requests_on_a_sleeping_replica_wait_and_its_sessions_move_to_others() -> None:
    async def play() -> None:
        both, (first, second) = make(2)
        await asyncio.gather(both.generate(ask("a")), both.generate(ask("b")))
        begun = asyncio.create_task(both.generate(ask("a", max_tokens=400)))
        await until(lambda: both.loads == (1, 0))
        await both.sleep((), replicas=[0])
        for name in ("c", "d"):
            await both.generate(ask(name))
        assert second.asked == ["b", "c", "d"]
        assert not begun.done()
        await both.pause()
        await both.resume()  # of all: what is suspended stays so
        await both.generate(ask("b"))
        assert not begun.done()
        await both.update_weights(1, new_weights())
        await both.wake_up(replicas=[0])
        assert (await begun).version_spans[-1][0] == 1
        assert first.asked == ["a", "a"]
        await both.close()

    run(play())


def test_a_session_moves_from_a_sleeping_replica_and_its_reply_is_the_same() -> None:
    async def play() -> None:
        both, (first, second) = make(2)
        alone = Mortal()
        before = await both.generate(ask("a"))
        await both.sleep(("kv_cache",), replicas=[0])
        longer = request("a/1", (*PROMPT, *before.token_ids, 4), "a", max_tokens=4)
        moved = await both.generate(longer)
        assert (first.asked, second.asked) == (["a"], ["a"])
        expected = await alone.generate(longer)
        assert (moved.token_ids, moved.logprobs) == (expected.token_ids, expected.logprobs)
        assert (await first.stats()).sessions == 0, "the replica that sleeps keeps nothing of it"
        await both.wake_up(replicas=[0])
        await both.generate(ask("a"))
        assert second.asked == ["a", "a"], "it stays where it is now"
        await both.close()
        await alone.close()

    run(play())


def test_with_all_replicas_asleep_a_session_waits() -> None:
    async def play() -> None:
        both, (first, second) = make(2)
        await both.generate(ask("a"))
        await both.sleep(())
        waiting = asyncio.create_task(both.generate(ask("a")))
        await until(lambda: first.asked == ["a", "a"])
        assert not waiting.done()
        await both.wake_up()
        assert len((await waiting).token_ids) == 4
        assert second.asked == []
        await both.close()

    run(play())


def test_an_abort_reaches_the_replica_of_the_reply() -> None:
    async def play() -> None:
        both, _ = make(2)
        replies = [asyncio.create_task(both.generate(ask(name, max_tokens=400))) for name in ("a", "b")]
        await until(lambda: both.loads == (1, 1))
        await asyncio.sleep(0.02)
        await both.abort(["a/0", "b/0"])
        assert [reply.finish_reason for reply in await asyncio.gather(*replies)] == ["aborted"] * 2
        await both.close()

    run(play())
