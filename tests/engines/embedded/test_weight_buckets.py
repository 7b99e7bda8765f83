"""Weight updates in buckets: complete or rejected."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from torch_models import make_engine, make_model, prompt, request

from rollgym.core.errors import AgentError, UsageError
from rollgym.engines.base import WeightSource

Bucket = list[tuple[str, Any]]
ASK = request("1", prompt(0, 9))


def cut(model: Any, size: int = 3) -> list[Bucket]:
    pairs = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    return [pairs[at : at + size] for at in range(0, len(pairs), size)]


def test_buckets_equal_a_single_update() -> None:
    async def main() -> None:
        first, second = make_engine(make_model(seed=0)), make_engine(make_model(seed=0))
        new = make_model(seed=1)
        await first.update_weights(1, WeightSource(tensors=dict(new.named_parameters())))
        await second.update_weights(1, WeightSource(buckets=lambda: cut(new)))
        said = [await one.generate(ASK) for one in (first, second)]
        assert said[0].token_ids == said[1].token_ids
        assert said[0].logprobs == said[1].logprobs
        assert said[1].version == 1
        for one in (first, second):
            await one.close()

    asyncio.run(main())


def test_a_partial_update_stops_the_engine_until_a_complete_one() -> None:
    new = make_model(seed=1)

    def broken() -> Iterator[Bucket]:
        yield cut(new)[0]
        raise RuntimeError("a rank is lost")

    async def main() -> None:
        engine = make_engine(make_model(seed=0))
        with pytest.raises(RuntimeError, match="a rank is lost"):
            await engine.update_weights(1, WeightSource(buckets=broken))
        assert engine.version == 0
        with pytest.raises(AgentError, match="failed halfway, so the engine has mixed weights"):
            await engine.generate(ASK)
        await engine.update_weights(2, WeightSource(buckets=lambda: cut(new)))
        assert (await engine.generate(ASK)).version == 2
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda buckets: buckets[:-1], "The new weights lack"),
        (lambda buckets: [[("nobody", buckets[0][0][1])]], "no weights called nobody"),
        (lambda buckets: [[(buckets[0][0][0], buckets[0][0][1][:1])]], "has the shape"),
    ],
    ids=["too few", "unknown", "another shape"],
)
def test_buckets_of_another_model_are_rejected(change: Any, says: str) -> None:
    async def main() -> None:
        engine = make_engine(make_model(seed=0))
        with pytest.raises(UsageError, match=says):
            await engine.update_weights(1, WeightSource(buckets=lambda: change(cut(make_model(seed=1)))))
        await engine.close()

    asyncio.run(main())
