"""An engine that makes room: its memory is gone while it rests, and what it says afterwards is the same."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from torch_models import gather, make_engine, make_model, prompt, request

from rollgym.engines import WeightSource
from rollgym.engines.torch import TorchEngine
from rollgym.errors import AgentError


def weights(seed: int) -> dict[str, Any]:
    return dict(make_model(seed=seed).named_parameters())


async def hold(engine: TorchEngine) -> tuple[int, int]:
    stats = await engine.stats()
    return stats.weight_bytes, stats.cache_bytes


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("buckets", [False, True])
def test_released_memory_is_gone_and_new_weights_take_it_back(family: str, buckets: bool) -> None:
    new = dict(make_model(family, seed=1).named_parameters())

    async def main() -> None:
        engine, other = make_engine(make_model(family)), make_engine(make_model(family, seed=1))
        await gather(engine, [request("a", prompt(0, 9), "a")])
        had, cached = await hold(engine)
        assert had >= sum(p.nbytes for p in make_model(family).parameters())
        assert cached > 0
        await engine.release()
        assert await hold(engine) == (0, 0)
        source = WeightSource(buckets=lambda: [[one] for one in new.items()])
        await engine.update_weights(1, source if buckets else WeightSource(tensors=new))
        assert await hold(engine) == (had, 0), "as much as before, once"
        await engine.resume()
        [one] = await gather(engine, [request("x", prompt(1, 9), "a")])
        [same] = await gather(other, [request("x", prompt(1, 9), "a")])
        assert (one.token_ids, one.logprobs, one.version) == (same.token_ids, same.logprobs, 1)
        await engine.close()
        await other.close()

    asyncio.run(main())


def test_a_reply_under_way_goes_on_where_it_was() -> None:
    async def main() -> None:
        engine, other = make_engine(make_model()), make_engine(make_model())
        [whole] = await gather(other, [request("x", prompt(0, 9), "x", max_tokens=300, temperature=1.0)])
        call = asyncio.ensure_future(
            engine.generate(request("x", prompt(0, 9), "x", max_tokens=300, temperature=1.0))
        )
        while (await engine.stats()).passes < 40:
            await asyncio.sleep(0)
        await engine.release()
        asked = asyncio.ensure_future(engine.generate(request("y", prompt(1, 5), "y")))
        while not (await engine.stats()).waiting:
            await asyncio.sleep(0)
        assert await hold(engine) == (0, 0), "nothing is computed for whoever comes meanwhile"
        await engine.update_weights(0, WeightSource(tensors=weights(0)))
        await engine.resume()
        again = await call
        assert (again.token_ids, again.logprobs) == (whole.token_ids, whole.logprobs)
        assert (await asked).finish_reason in ("length", "stop")
        await engine.close()
        await other.close()

    asyncio.run(main())


def test_the_cache_alone_can_be_given_up_and_weights_must_come_before_it_goes_on(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)

    async def main() -> None:
        engine = make_engine(tmp_path)
        [before] = await gather(engine, [request("x", prompt(0, 9), "x")])
        had, _ = await hold(engine)
        await engine.release(weights=False)
        assert await hold(engine) == (had, 0)
        await engine.resume()
        [after] = await gather(engine, [request("x", prompt(0, 9), "x")])
        assert after.logprobs == before.logprobs
        await engine.release()
        await engine.release()  # twice is once
        with pytest.raises(AgentError, match="given up the memory of its weights: send new ones"):
            await engine.resume()
        await engine.update_weights(1, WeightSource(path=tmp_path))
        await engine.resume()
        [last] = await gather(engine, [request("x", prompt(0, 9), "x")])
        assert last.logprobs == before.logprobs
        await engine.close()

    asyncio.run(main())
