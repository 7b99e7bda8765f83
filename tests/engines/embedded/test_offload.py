"""Sleep and wake_up: memory is freed, and replies are the same afterwards."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from torch_models import gather, make_engine, make_model, prompt, request

from rollgym.core.errors import AgentError
from rollgym.engines.base import WeightSource
from rollgym.engines.embedded.engine import EmbeddedEngine


def weights(seed: int) -> dict[str, Any]:
    return dict(make_model(seed=seed).named_parameters())


async def hold(engine: EmbeddedEngine) -> tuple[int, int]:
    stats = await engine.stats()
    return stats.weight_bytes, stats.cache_bytes


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("buckets", [False, True])
def test_sleep_frees_memory_and_new_weights_reallocate_it(family: str, buckets: bool) -> None:
    new = dict(make_model(family, seed=1).named_parameters())

    async def main() -> None:
        engine, other = make_engine(make_model(family)), make_engine(make_model(family, seed=1))
        await gather(engine, [request("a", prompt(0, 9), "a")])
        had, cached = await hold(engine)
        assert had >= sum(p.nbytes for p in make_model(family).parameters())
        assert cached > 0
        await engine.sleep()
        assert await hold(engine) == (0, 0)
        source = WeightSource(buckets=lambda: [[one] for one in new.items()])
        await engine.update_weights(1, source if buckets else WeightSource(tensors=new))
        assert await hold(engine) == (had, 0), "as much as before, once"
        await engine.wake_up()
        [one] = await gather(engine, [request("x", prompt(1, 9), "a")])
        [same] = await gather(other, [request("x", prompt(1, 9), "a")])
        assert (one.token_ids, one.logprobs, one.version) == (same.token_ids, same.logprobs, 1)
        await engine.close()
        await other.close()

    asyncio.run(main())


def test_a_reply_in_flight_continues_after_sleep() -> None:
    async def main() -> None:
        engine, other = make_engine(make_model()), make_engine(make_model())
        [whole] = await gather(other, [request("x", prompt(0, 9), "x", max_tokens=300, temperature=1.0)])
        call = asyncio.ensure_future(
            engine.generate(request("x", prompt(0, 9), "x", max_tokens=300, temperature=1.0))
        )
        while (await engine.stats()).passes < 40:
            await asyncio.sleep(0)
        await engine.sleep()
        asked = asyncio.ensure_future(engine.generate(request("y", prompt(1, 5), "y")))
        while not (await engine.stats()).waiting:
            await asyncio.sleep(0)
        assert await hold(engine) == (0, 0), "nothing is computed for new requests while asleep"
        await engine.update_weights(0, WeightSource(tensors=weights(0)))
        await engine.wake_up()
        again = await call
        assert (again.token_ids, again.logprobs) == (whole.token_ids, whole.logprobs)
        assert (await asked).finish_reason in ("length", "stop")
        await engine.close()
        await other.close()

    asyncio.run(main())


def test_the_kv_cache_alone_can_be_freed_and_waking_up_needs_weights(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)

    async def main() -> None:
        engine = make_engine(tmp_path)
        [before] = await gather(engine, [request("x", prompt(0, 9), "x")])
        had, _ = await hold(engine)
        await engine.sleep(["kv_cache"])
        assert await hold(engine) == (had, 0)
        await engine.wake_up()
        [after] = await gather(engine, [request("x", prompt(0, 9), "x")])
        assert after.logprobs == before.logprobs
        await engine.sleep()
        await engine.sleep()  # twice is once
        with pytest.raises(AgentError, match="weights were released: call update_weights before wake_up"):
            await engine.wake_up()
        await engine.update_weights(1, WeightSource(path=tmp_path))
        await engine.wake_up()
        [last] = await gather(engine, [request("x", prompt(0, 9), "x")])
        assert last.logprobs == before.logprobs
        await engine.close()

    asyncio.run(main())
