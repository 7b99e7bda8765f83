"""Engine and learner in actors: the same tokens and weights, and recovery after a death."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_models import make_engine, make_model, prompt, request

from rollgym.cluster.connect import Connection, connect
from rollgym.cluster.engine import RemoteEngine
from rollgym.cluster.errors import ActorLost
from rollgym.core.errors import EngineLost, RunError, UsageError
from rollgym.engines.base import BadRequest, GenerateRequest, Generation, WeightSource
from rollgym.engines.weight_sync.chain import WeightChain
from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions
from rollgym.trainer.learner.learner import Learner
from rollgym.trainer.learner.multi_role import MultiRoleLearner, policy_config
from rollgym.trainer.learner.protocol import OFFLOADABLE
from rollgym.trainer.learner.ray_learner import RayLearner
from rollgym.trainer.losses.settings import LossConfig

ray: Any = pytest.importorskip("ray")
CONFIG = LearnerConfig(learning_rate=0.01, threads=1, mini_batches=2)
LOSS = LossConfig("grpo", kl_coef=0.01)
SEED = LearnerOptions(seed=7)
VALUE_ONLY = replace(SEED, value_only=True)


@pytest.fixture(scope="module")
def here() -> Iterator[Connection]:
    with connect(gpus=2, cpus=4) as connection:
        yield connection


def test_a_remote_engine_matches_a_local_one_token_for_token(here: Connection, models: Path) -> None:
    requests = [
        request(f"r{number}", prompt(number, 3 + number % 5), f"s{number}", seed=number, temperature=1.0)
        for number in range(12)
    ]

    async def main() -> None:
        local = make_engine(models)
        engine = await RemoteEngine.start(models, actor_options={"num_cpus": 1, "num_gpus": 0.5}, threads=1)
        try:
            assert (engine.context_length, engine.version) == (local.context_length, 0)
            ours = await asyncio.gather(*(engine.generate(one) for one in requests))
            theirs = await asyncio.gather(*(local.generate(one) for one in requests))
            assert [(r.token_ids, r.logprobs) for r in ours] == [(r.token_ids, r.logprobs) for r in theirs]
            assert len({r.token_ids for r in ours}) > 6, "they differ from one another"

            weights = WeightSource(tensors=dict(make_model(seed=5).named_parameters()))
            await engine.update_weights(3, weights)
            await local.update_weights(3, weights)
            new, same = await engine.generate(requests[0]), await local.generate(requests[0])
            assert (new.token_ids, new.logprobs, new.version) == (same.token_ids, same.logprobs, 3)
            assert new.token_ids != ours[0].token_ids
            await makes_room(engine, requests[0], new)
            await asks_for_too_much(engine)
            await stops_where_it_is_told_to(engine)
            await dies_and_comes_back(engine, new.token_ids)
        finally:
            await engine.close()
            await local.close()
        with pytest.raises(EngineLost, match="closed"):
            await engine.generate(requests[0])

    asyncio.run(main())


async def makes_room(engine: RemoteEngine, asked: GenerateRequest, expected: Generation) -> None:
    """What it gives up comes back with new weights or, where none came, with the last."""
    before = await engine.stats()
    assert await engine.sleep() == before.weight_bytes + before.cache_bytes > 0
    assert (await engine.stats()).weight_bytes == 0
    await engine.wake_up()
    assert (await engine.stats()).weight_bytes == before.weight_bytes
    assert (await engine.generate(asked)).logprobs == expected.logprobs


async def asks_for_too_much(engine: RemoteEngine) -> None:
    with pytest.raises(BadRequest, match="has no prompt ids"):
        await engine.generate(request("none", []))
    with pytest.raises(UsageError, match="no weights called"):
        await engine.update_weights(3, WeightSource(tensors={"nonsense": make_model().lm_head.weight}))
    await engine.update_weights(3, WeightSource(tensors=dict(make_model(seed=5).named_parameters())))


async def stops_where_it_is_told_to(engine: RemoteEngine) -> None:
    await engine.pause()
    waiting = [asyncio.create_task(engine.generate(request(name, [1, 2], max_tokens=400))) for name in "ab"]
    while (await engine.stats()).waiting + (await engine.stats()).running < 2:
        await asyncio.sleep(0.01)
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    while (await engine.stats()).waiting + (await engine.stats()).running > 1:
        await asyncio.sleep(0.01)  # the cancelled one goes there too, or this never ends
    await engine.abort(["b"])
    await engine.resume()
    assert (await waiting[1]).finish_reason == "aborted"


async def dies_and_comes_back(engine: RemoteEngine, expected: tuple[int, ...]) -> None:
    await engine.pause()
    lost = asyncio.create_task(engine.generate(request("lost", [1, 2], max_tokens=400)))
    while not (await engine.stats()).waiting:
        await asyncio.sleep(0.01)
    client = engine._client
    assert client is not None
    ray.kill(client.actor)
    with pytest.raises(EngineLost, match="The engine's actor is lost"):
        await lost
    await engine.resume()
    again = await engine.generate(request("r0", prompt(0, 3), "s0", seed=0, temperature=1.0))
    assert (again.token_ids, again.version) == (expected, 3), "with the weights that it had"
    assert engine.deaths == 1


def test_reconnecting_waits_for_the_start_that_replaced_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is cancelled because the engine moves does not count as a reconnection."""

    async def main() -> None:
        engine, moved, starts = RemoteEngine("model"), asyncio.Event(), 0

        async def start() -> None:
            nonlocal starts
            starts += 1
            await (asyncio.Event() if starts == 1 else moved).wait()
            engine._client = object()  # type: ignore[assignment]

        monkeypatch.setattr(engine, "_start", start)
        reconnecting = asyncio.create_task(engine.reconnect())
        await asyncio.sleep(0.01)
        moving = asyncio.create_task(engine.restart({"num_cpus": 2}))
        await asyncio.sleep(0.01)
        assert starts == 2
        assert not reconnecting.done()
        moved.set()
        assert await reconnecting
        await moving

    asyncio.run(main())


def test_an_engine_without_a_model_is_one_sentence(here: Connection, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(EngineLost, match="The engine could not be started: .*the folder does not exist"):
            await RemoteEngine.start(tmp_path / "nothing")

    asyncio.run(main())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The model of the batches in learner_cases."""
    from learner_cases import tiny

    tiny().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def ray_learner(folder: Path, **given: Any) -> RayLearner:
    return RayLearner(folder, CONFIG, LOSS, SEED, **{"strategy": "single", **given})


def batches(count: int) -> list[Any]:
    from learner_cases import mixed_batch

    return [mixed_batch(seed) for seed in range(count)]


def test_a_ray_learner_learns_what_a_local_one_learns(here: Connection, folder: Path, tmp_path: Path) -> None:
    local = Learner(folder, CONFIG, LOSS, SEED)
    remote = ray_learner(folder, actor_options=[{"num_gpus": 1, "num_cpus": 1}])
    first, second, third = batches(3)
    assert remote.has_critic is local.has_critic is False
    for batch in (first, second):
        assert np.array_equal(remote.logprobs(batch), local.logprobs(batch))
        assert np.array_equal(remote.reference(batch), local.reference(batch))
        assert remote.update(batch) == local.update(batch)
    weights = remote.weights().tensors
    assert isinstance(weights, WeightChain)
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {
        name: tensor.tolist() for name, tensor in (local.weights().tensors or {}).items()
    }
    saved = tmp_path / "saved"
    saved.mkdir()
    remote.save(saved)

    remote.update(third)
    ray.kill(remote.workers.actors[0])
    with pytest.raises(ActorLost, match="actor_train rank 0 is lost"):
        remote.update(third)
    remote.restart(saved)
    assert remote.update(third) == local.update(third), "as if nothing had happened"

    out = tmp_path / "out"
    for one in (remote, local):
        before = one.logprobs(first)
        one.start_imitation(0.01, 4)
        one.update(first)
        assert not np.array_equal(one.logprobs(first), before)
        learnt = one.logprobs(first)
        one.end_imitation(None)
        assert np.array_equal(one.logprobs(first), learnt), "what was learnt stays"
    assert remote.update(second) == local.update(second)
    assert np.array_equal(remote.logprobs(first), local.logprobs(first))
    out.mkdir()
    remote.export(out)
    assert (out / "model.safetensors").is_file()
    remote.close()


def test_a_separate_reference_and_critic_learn_the_same(
    here: Connection, folder: Path, tmp_path: Path
) -> None:
    from rank_cases import batch_for

    config = replace(CONFIG, critic="separate", critic_rate=0.02, epochs=2, value_clip=0.3)
    loss, place = LossConfig("ppo", kl_coef=0.05), {"num_cpus": 1}
    common: dict[str, Any] = {"strategy": "single", "actor_options": [place]}
    local = Learner(folder, config, loss, SEED)
    plain = policy_config(config)
    policy = RayLearner(folder, plain, loss, replace(SEED, keep_reference=False), **common)
    reference = RayLearner(folder, plain, LossConfig("reinforce"), SEED, role="reference", **common)
    critic = RayLearner(folder, config, loss, VALUE_ONLY, role="critic", **common)
    offloads = {"policy": ["optimizer"], "critic": OFFLOADABLE}
    learner = MultiRoleLearner(policy, reference, critic, offloads)
    assert learner.has_critic
    for seed in range(2):
        batch, same = batch_for(local, seed), batch_for(learner, seed)
        assert set(batch.arrays) == set(same.arrays)
        assert all(np.array_equal(batch.arrays[name], same.arrays[name]) for name in batch.arrays)
        assert learner.update(same) == local.update(batch), "values, losses and norms alike"
        held = learner.held()
        assert learner.offload()["optimizer"] == held["optimizer"]
        assert learner.held()["optimizer"] == 0
        assert 0 < learner.held()["weights"] < held["weights"], "only the critic's left"
    saved = tmp_path / "saved"
    saved.mkdir()
    learner.save(saved)
    expected = learner.values(batch)[0]
    learner.update(batch_for(learner, 5))
    assert not np.array_equal(learner.values(batch)[0], expected)
    learner.load(saved)
    assert np.array_equal(learner.values(batch)[0], expected)
    weights = learner.weights().tensors or {}
    assert all(weights[name].equal(tensor) for name, tensor in (local.weights().tensors or {}).items())
    (saved / "critic" / "learner.safetensors").unlink()
    (saved / "critic" / "optimizer.pt").unlink()
    (saved / "critic").rmdir()
    with pytest.raises(RunError, match=r"has no separate critic: critic/ is missing\.$"):
        learner.load(saved)
    for one in (learner, local):
        one.start_imitation(0.01, 1)
        one.update(batches(1)[0])
        taught = tmp_path / type(one).__name__
        taught.mkdir()
        one.export(taught)
        one.end_imitation(taught)
    assert not learner.values(batch)[0].any(), "the critic's head is zero again"
    assert learner.update(same) == local.update(same)
    expected = local.values(batch)[0]
    assert expected.any()
    assert np.array_equal(learner.values(batch)[0], expected), "both critics start from the taught policy"
    ray.kill(critic.workers.actors[0])
    with pytest.raises(ActorLost, match="critic rank 0 is lost"):
        learner.update(same)
    learner.close()


def test_wrong_places_are_refused(here: Connection, folder: Path) -> None:
    message = r"^strategy=single needs exactly 1 rank, got 2\. For several ranks choose one of ddp, fsdp2, "
    with pytest.raises(UsageError, match=message):
        ray_learner(folder, actor_options=[{}, {}])


def test_every_rank_imports_what_registers_the_loss(here: Connection, folder: Path) -> None:
    place = {"num_cpus": 1}
    with pytest.raises(UsageError, match="no_such_losses: no such module"):
        ray_learner(folder, actor_options=[place], imports=["no_such_losses"])
    learner = ray_learner(folder, actor_options=[place], imports=["this"])
    known = learner.workers.actors[0].__ray_call__.remote(lambda rank: "this" in sys.modules)
    assert ray.get(known)
    learner.close()


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns_and_continue_as_one(
    here: Connection, folder: Path, tmp_path: Path
) -> None:
    local = Learner(folder, CONFIG, LOSS, SEED)
    ranks = [{"num_gpus": 1, "num_cpus": 1}] * 2
    remote = RayLearner(folder, CONFIG, LOSS, SEED, strategy="ddp", actor_options=ranks)
    first, second, third = batches(3)
    for batch in (first, second):
        ours, theirs = remote.update(batch), local.update(batch)
        assert ours["policy_loss"] == pytest.approx(theirs["policy_loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert np.allclose(remote.logprobs(third), local.logprobs(third), atol=1e-4)
    saved = tmp_path / "saved"
    saved.mkdir()
    remote.save(saved)
    ray.kill(remote.workers.actors[1])
    with pytest.raises(ActorLost, match="actor_train rank 1 is lost"):
        remote.update(third)
    remote.restart(saved, actor_options=ranks[:1])
    assert remote.workers.world == 1
    assert remote.update(third)["policy_loss"] == pytest.approx(local.update(third)["policy_loss"], abs=1e-5)
    tensors = remote.weights().tensors or {}
    for name, tensor in (local.weights().tensors or {}).items():
        assert np.allclose(tensors[name].numpy(), tensor.numpy(), atol=1e-4), name
    remote.close()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
def test_policy_and_critic_of_two_ranks_each_learn_what_one_learner_learns(
    here: Connection, folder: Path, tmp_path: Path, strategy: str
) -> None:
    from rank_cases import batch_for

    config = replace(CONFIG, critic="separate", critic_rate=0.02)
    loss = LossConfig("ppo", kl_coef=0.05)
    # Logical devices are shared out in halves: there are two, and four ranks.
    halves = [{"num_cpus": 0.5, "num_gpus": 0.5}] * 2
    common: dict[str, Any] = {"strategy": strategy, "actor_options": halves}
    local = Learner(folder, config, loss, SEED)
    policy = RayLearner(folder, policy_config(config), loss, SEED, **common)
    critic = RayLearner(folder, config, loss, VALUE_ONLY, role="critic", **common)
    learner = MultiRoleLearner(policy, None, critic)
    for seed in range(3):
        batch, same = batch_for(local, seed), batch_for(learner, seed)
        for name in batch.arrays:
            assert np.allclose(batch.arrays[name], same.arrays[name], atol=1e-4), name
        ours, theirs = learner.update(same), local.update(batch)
        assert ours.keys() == theirs.keys()
        for name in ("policy_loss", "value_loss"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-4)
    expected = learner.values(batch)[0]
    assert np.allclose(expected, local.values(batch)[0], atol=1e-3)
    saved = tmp_path / "saved"
    saved.mkdir()
    learner.save(saved)
    learner.update(batch_for(learner, 5))
    assert not np.allclose(learner.values(batch)[0], expected, atol=1e-3)
    learner.load(saved)
    assert np.allclose(learner.values(batch)[0], expected, atol=1e-6)
    ray.kill(critic.workers.actors[1])
    with pytest.raises(ActorLost, match="critic rank 1 is lost"):
        learner.update(same)
    learner.close()
