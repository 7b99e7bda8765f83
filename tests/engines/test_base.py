"""`as_engine`: partial engines get the missing methods of the protocol."""

import asyncio
from typing import Any

import pytest

from rollgym.core.errors import UsageError
from rollgym.engines.base import EngineStats, GenerateRequest, Generation, WeightSource, as_engine
from rollgym.testing import ScriptedEngine


class Partial:
    """The least that can be sampled from."""

    version = 3
    context_length = 16

    async def generate(self, request: GenerateRequest) -> Generation:
        ids = request.prompt_ids
        return Generation(
            token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop", version_spans=((3, 2),)
        )


def test_a_complete_engine_is_returned_unchanged() -> None:
    engine = ScriptedEngine([1])
    assert as_engine(engine) is engine


def test_a_partial_engine_gets_defaults() -> None:
    async def main() -> None:
        engine = as_engine(Partial())
        assert (engine.version, engine.context_length, engine.num_replicas) == (3, 16, 1)
        reply = await engine.generate(GenerateRequest(request_id="a", prompt_ids=(1, 2)))
        assert reply.token_ids == (1, 2)
        await engine.abort(["a"])
        await engine.forget("session")
        assert await engine.stats() == EngineStats()
        assert await engine.reconnect() is False
        with pytest.raises(UsageError, match="Partial does not support update_weights"):
            await engine.update_weights(1, WeightSource(tensors={}))
        with pytest.raises(UsageError, match="Partial does not support pause"):
            await engine.sleep()
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize("engine", [object(), "engine"])
def test_other_objects_are_rejected(engine: Any) -> None:
    with pytest.raises(UsageError, match="is not an engine: it has no 'version'"):
        as_engine(engine)


def test_an_engine_without_memory_to_free_only_pauses_while_asleep() -> None:
    async def main() -> None:
        engine = ScriptedEngine([1, 2], version=5)
        assert await engine.sleep() == 0
        waiting = asyncio.create_task(engine.generate(GenerateRequest(request_id="a", prompt_ids=(1,))))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await engine.wake_up()
        assert (await waiting).token_ids == (1, 2)

    asyncio.run(main())
