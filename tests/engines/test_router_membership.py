"""Router membership: replicas that join, leave, are lost and reconnect."""

import asyncio
from typing import Any

import pytest
from torch_models import make_model, request

from rollgym.core.errors import AgentError, EngineLost
from rollgym.engines.base import GenerateRequest, Generation, WeightSource
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.engines.router import RoutedEngine

MODEL = make_model()


class Mortal(EmbeddedEngine):
    """A real engine that can be lost, and found again."""

    def __init__(self) -> None:
        super().__init__(MODEL, threads=1)
        self.dead = False
        self.found = asyncio.Event()
        self.asked = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        if self.dead:
            raise EngineLost("it is dead")
        self.asked += 1
        return await super().generate(request)

    async def reconnect(self) -> bool:
        await self.found.wait()
        self.dead = False
        return True


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def weights() -> WeightSource:
    return WeightSource(tensors=dict(make_model(seed=1).named_parameters()))


def test_new_replicas_join_with_the_next_weights_and_removed_ones_get_no_requests() -> None:
    async def play() -> None:
        first, second, third = (Mortal() for _ in range(3))
        engine = RoutedEngine([first, second])
        await engine.generate(request("a", [1, 2], "a"))
        engine.set_replicas([second, third])
        assert engine.engines == (second, third)
        assert engine.lost == {1: "it has no weights yet"}
        for name in "bcd":
            await engine.generate(request(name, [1, 2], name))
        assert (first.asked, second.asked, third.asked) == (1, 3, 0)
        await engine.update_weights(1, weights())
        assert not engine.lost
        await asyncio.gather(*(engine.generate(request(name, [1, 2], name)) for name in "efgh"))
        assert (first.asked, third.asked > 0) == (1, True)
        assert (first.version, third.version) == (0, 1)
        await engine.close()
        await first.close()

    run(play())


def test_requests_wait_while_the_replicas_are_replaced() -> None:
    async def play() -> None:
        first, second = Mortal(), Mortal()
        engine = RoutedEngine([first], patience=100)
        engine.set_replicas(())
        waiting = asyncio.create_task(engine.generate(request("a", [1, 2], "a")))
        await asyncio.sleep(0)
        engine.set_replicas([second])
        await asyncio.sleep(0)
        assert not waiting.done()
        await engine.update_weights(4, weights())
        assert (await waiting).version == 4
        await engine.close()
        await first.close()
        hasty = RoutedEngine([Mortal()])
        [old] = hasty.engines
        hasty.set_replicas(())
        with pytest.raises(EngineLost, match="they are being replaced"):
            await hasty.generate(request("a", [1, 2], "a"))
        await old.close()

    run(play())


def test_the_only_replica_is_waited_for_when_lost() -> None:
    async def play() -> None:
        only = Mortal()
        engine = RoutedEngine([only], patience=100)
        only.dead = True
        with pytest.raises(EngineLost, match="it is dead"):
            await engine.generate(request("a", [1, 2], "a"))
        waiting = asyncio.create_task(engine.generate(request("b", [1, 2], "b")))
        renewed = asyncio.create_task(engine.update_weights(1, weights()))
        await asyncio.sleep(0)
        assert not waiting.done()
        only.found.set()
        await renewed
        assert len((await waiting).token_ids) == 12
        assert engine.version == only.version == 1
        await engine.close()

    run(play())


class Slow(Mortal):
    """Takes new weights only when it is let; ``deaf`` ones keep the version they had."""

    def __init__(self, *, deaf: bool = False) -> None:
        super().__init__()
        self.begun, self.let = asyncio.Event(), asyncio.Event()
        self.deaf = deaf

    async def update_weights(self, version: int, weights: WeightSource) -> None:
        self.begun.set()
        await self.let.wait()
        await super().update_weights(self.version if self.deaf else version, weights)


def test_a_replica_that_reconnects_during_an_update_gets_the_new_weights() -> None:
    async def play() -> None:
        slow, lost = Slow(), Mortal()
        engine = RoutedEngine([slow, lost])
        lost.dead = True
        await asyncio.gather(
            *(engine.generate(request(name, [1, 2], name)) for name in "ab"), return_exceptions=True
        )
        assert engine.lost == {1: "it is dead"}
        update = asyncio.create_task(engine.update_weights(1, weights()))
        await slow.begun.wait()
        lost.found.set()
        while lost.dead:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert 1 in engine.lost, "it has the old weights still"
        slow.let.set()
        await update
        assert not engine.lost, "and takes part without waiting for another update"
        assert (engine.version, slow.version, lost.version) == (1, 1, 1)
        replies = await asyncio.gather(*(engine.generate(request(name, [1, 2], name)) for name in "cd"))
        assert {reply.version for reply in replies} == {1}
        await engine.close()

    run(play())


def test_a_replica_that_does_not_have_the_new_version_is_named() -> None:
    async def play() -> None:
        deaf = Slow(deaf=True)
        deaf.let.set()
        engine = RoutedEngine([Mortal(), deaf])
        with pytest.raises(AgentError, match="different versions: replica 0 has 3, replica 1 has 0"):
            await engine.update_weights(3, weights())
        await engine.close()

    run(play())


def test_a_reconnected_replica_stays_out_while_it_has_another_version() -> None:
    async def play() -> None:
        deaf = Slow(deaf=True)
        deaf.let.set()
        engine = RoutedEngine([Mortal(), deaf])
        deaf.dead = True
        await asyncio.gather(
            *(engine.generate(request(name, [1, 2], name)) for name in "ab"), return_exceptions=True
        )
        await engine.update_weights(1, weights())
        deaf.found.set()
        while deaf.dead:
            await asyncio.sleep(0)
        await engine.update_weights(2, weights())
        assert engine.lost == {1: "it is dead"}
        assert (await engine.generate(request("c", [1, 2], "c"))).version == 2
        await engine.close()

    run(play())
