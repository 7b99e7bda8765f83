"""Weights from sharded ranks to engines on Ray: each engine has the bits of a full update."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learner_cases import mixed_batch, tiny
from torch_models import make_engine, request

from rollgym.cluster.connect import Connection, connect
from rollgym.cluster.engine import RemoteEngine
from rollgym.cluster.errors import ActorLost
from rollgym.engines.base import Engine, WeightSource
from rollgym.engines.router import RoutedEngine
from rollgym.engines.weight_sync.chain import WeightChain
from rollgym.engines.weight_sync.wire import WireFormat
from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions
from rollgym.trainer.learner.ray_learner import RayLearner
from rollgym.trainer.losses.settings import LossConfig

ray: Any = pytest.importorskip("ray")
CONFIG = LearnerConfig(learning_rate=1e-4, threads=1)
DELTA = WireFormat(dtype="bfloat16", delta=True, full_every=4)
ASKED = [request(f"r{number}", [1 + number, 2, 3], seed=number, max_tokens=20) for number in range(4)]
RANKS = [{"num_cpus": 0.5, "num_gpus": 0.5}] * 2


@pytest.fixture(scope="module")
def here() -> Iterator[Connection]:
    with connect(gpus=2, cpus=4) as connection:
        yield connection


async def replies(engine: Engine) -> list[Any]:
    """Sampled tokens with their log-probs: other bits of the weights give others."""
    found = await asyncio.gather(*(engine.generate(one) for one in ASKED))
    return [(one.token_ids, one.logprobs, one.version) for one in found]


async def expected(learner: RayLearner, folder: Path, version: int) -> list[Any]:
    """The replies of an engine in this process that has read the learner's export."""
    folder.mkdir(exist_ok=True)
    await asyncio.to_thread(learner.export, folder)
    engine = make_engine(tiny(9), dtype="bfloat16")
    await engine.update_weights(version, WeightSource(path=folder))
    found = await replies(engine)
    await engine.close()
    return found


@pytest.mark.slow
def test_engines_get_deltas_of_two_ranks_and_keep_the_bits_of_full_updates(
    here: Connection, tmp_path: Path
) -> None:
    tiny().save_pretrained(tmp_path / "model")
    options = LearnerOptions(seed=7, bucket_bytes=5000)
    loss = LossConfig("grpo")
    learner = RayLearner(tmp_path / "model", CONFIG, loss, options, strategy="fsdp2", actor_options=RANKS)

    def step(seed: int, wire: WireFormat = DELTA) -> tuple[WeightSource, WeightChain]:
        learner.update(mixed_batch(seed))
        source = learner.weights(wire)
        assert isinstance(source.tensors, WeightChain)
        return source, source.tensors

    async def main() -> None:
        first, second = await asyncio.gather(
            *(
                RemoteEngine.start(
                    tmp_path / "model", actor_options={"num_cpus": 1}, threads=1, dtype="bfloat16"
                )
                for _ in range(2)
            )
        )
        both = RoutedEngine([first, second])
        assert both.weight_dtype == first.weight_dtype == "bfloat16"
        try:
            source, full = step(1)
            await both.update_weights(1, source)
            now = await expected(learner, tmp_path / "export", 1)
            assert await replies(first) == await replies(second) == now
            assert full.last.base is None
            assert len(full.last.buckets) > 3
            assert [len(handles) for handles in full.last.buckets] == [2] * len(full.last.buckets)

            source, delta = step(2)
            await first.update_weights(2, source)  # the second engine misses it
            assert delta.last.base == full.last.stamp
            assert 0 < delta.sent.changed < delta.sent.values == full.sent.values
            assert delta.sent.nbytes < full.sent.nbytes
            assert await replies(second) == now

            source, third = step(3)
            assert len(third.links) == 3
            await both_get(first, second, 3, source)
            now = await expected(learner, tmp_path / "export", 3)
            assert await replies(first) == await replies(second) == now

            client = first._client
            assert client is not None
            ray.kill(client.actor)
            while first.deaths == 0:
                await asyncio.sleep(0.05)
            assert await replies(first) == now, "the full update and the deltas again"
            source, fourth = step(4)
            assert fourth.last.base == third.last.stamp
            await both_get(first, second, 4, source)
            now = await expected(learner, tmp_path / "export", 4)
            assert await replies(first) == await replies(second) == now
            source, fifth = step(5)
            assert fifth.last.base is None, "every fourth update is full"
            await both_get(first, second, 5, source)

            on_disk = replace(DELTA, folder=tmp_path / "parts")
            for version in (6, 7, 8):
                source, chain = step(version, on_disk)
                await both_get(first, second, version, source)
                files = len(list((tmp_path / "parts").iterdir()))
                assert files == 2 * sum(len(link.buckets) for link in chain.links)
            assert [link.base is None for link in chain.links] == [True, False, False]
            now = await expected(learner, tmp_path / "export", 8)
            assert await replies(first) == await replies(second) == now

            await loses_a_rank(learner, first, second, tmp_path)
        finally:
            await asyncio.gather(first.close(), second.close())

    try:
        asyncio.run(main())
    finally:
        learner.close()


async def both_get(first: Engine, second: Engine, version: int, source: WeightSource) -> None:
    await asyncio.gather(*(engine.update_weights(version, source) for engine in (first, second)))


async def loses_a_rank(learner: RayLearner, first: Engine, second: Engine, folder: Path) -> None:
    """The update fails with the rank's name; after a restart, the next one is full."""
    before = await replies(first)
    saved = folder / "saved"
    saved.mkdir()
    await asyncio.to_thread(learner.save, saved)
    await asyncio.to_thread(learner.update, mixed_batch(9))
    ray.kill(learner.workers.actors[1])
    source = learner.weights(DELTA)
    with pytest.raises(ActorLost, match="actor_train rank 1 is lost"):
        await first.update_weights(9, source)
    assert await replies(first) == before
    await asyncio.to_thread(learner.restart, saved)
    source = learner.weights(DELTA)
    assert isinstance(source.tensors, WeightChain)
    assert source.tensors.last.base is None
    await both_get(first, second, 9, source)
    now = [(ids, logprobs, 9) for ids, logprobs, _ in before]
    assert await replies(first) == await replies(second) == now
