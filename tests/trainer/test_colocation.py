"""Colocation: learner and engine offload for one another, and training gives the same weights."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from learner_cases import make_learner, mixed_batch, tiny
from torch_models import request
from training import Story, fast_versions, write

from rollgym.config.loader import load
from rollgym.engines.embedded.engine import EmbeddedEngine
from rollgym.engines.router import RoutedEngine
from rollgym.trainer.colocation import Colocation
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.loop import train
from rollgym.trainer.main import open_components
from rollgym.trainer.runtime import OFFLOADS
from rollgym.trainer.tracking.console import Console
from rollgym.trainer.train_run import TrainRun


def run_with(folder: Path, seen: list[dict[str, float]], **changes: Any) -> Path:
    """A small run; the colocation metrics of each weight sync are added to ``seen``."""
    folder.mkdir()
    config = load(TrainConfig, write(folder, **changes), ["name=small"])
    run = TrainRun(config, folder / "run", Console(plain=True))

    async def main() -> None:
        async with open_components(config, run.folder) as components:
            sync_weights = type(components).sync_weights

            async def noted(self: Any, version: int) -> None:
                await sync_weights(self, version)
                seen.append(dict(self.colocation_metrics))

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(components), "sync_weights", noted)
                await train(components, run)

    try:
        asyncio.run(main())
    finally:
        run.close()
    return run.folder


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offloading_does_not_change_the_trained_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    fast_versions(monkeypatch)
    seen: list[dict[str, float]] = []
    more = {"loss": {"name": "grpo", "kl_coef": 0.01}, "stop": {"steps": 3}, "evaluation": {"every": 2}}
    plain = Story.of(run_with(tmp_path / "plain", [], **more))
    moved = Story.of(run_with(tmp_path / "moved", seen, devices={"offload": offload}, **more))
    assert moved.weights == plain.weights
    assert [one["turns"] for one in moved.episodes] == [one["turns"] for one in plain.episodes]
    assert len(seen) == 3
    assert "colocation_reloaded_bytes" in seen[0], "nothing was offloaded yet"
    for step in seen:
        assert step["colocation_seconds"] > 0
        assert step["colocation_released_bytes"] > 0
        assert step["colocation_offloaded_bytes"] > 0
    assert (
        seen[1]["colocation_reloaded_bytes"]
        == seen[0]["colocation_offloaded_bytes"]
        == seen[2]["colocation_reloaded_bytes"]
    )


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_engines_sleep_during_the_warm_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    fast_versions(monkeypatch)
    seen: list[dict[str, float]] = []
    lessons = {"agent": "lessons:Teacher", "episodes": 12, "epochs": 2, "batch": 4, "check_every": 2}
    more = {"warm_start": lessons, "stop": {"steps": 1}}
    plain = Story.of(run_with(tmp_path / "plain", [], **more))
    moved = Story.of(run_with(tmp_path / "moved", seen, devices={"offload": offload}, **more))
    assert moved.weights == plain.weights
    assert len(seen) == 4, "three weight syncs for six batches, and one step"
    for step in seen:
        # Nothing is cached if no episode ran in between.
        assert step["colocation_released_bytes"] > 0 or offload == "optimizer"
        assert step["colocation_offloaded_bytes"] > 0
    left, back = seen[0]["colocation_offloaded_bytes"], seen[1]["colocation_reloaded_bytes"]
    assert left == back == seen[2]["colocation_reloaded_bytes"], "all that was offloaded came back"
    # The optimizer is new after imitation: the two moments of each weight are gone.
    assert seen[3]["colocation_reloaded_bytes"] == (left / 3 if offload == "all" else 0)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_learner_and_engine_hold_memory_only_in_their_turn(offload: str, several: bool) -> None:
    offloads, releases = OFFLOADS[offload]
    weights = "weights" in releases

    async def main() -> None:
        learner = make_learner(tiny())
        engines = [EmbeddedEngine(tiny(), threads=1) for _ in range(2 if several else 1)]
        engine: Any = RoutedEngine(engines) if several else engines[0]
        with ThreadPoolExecutor(1) as thread:

            async def compute(work: Any, *args: Any) -> Any:
                return await asyncio.get_running_loop().run_in_executor(thread, work, *args)

            colocation = Colocation(engine, [0], learner, compute, offloads=offloads, releases=releases)
            for version in (1, 2):
                await engine.generate(request("x", [1, 2, 3], "x"))
                async with colocation.training():
                    stats = await engines[0].stats()
                    assert stats.cache_bytes == 0
                    assert (stats.weight_bytes == 0) is weights
                    waiting = asyncio.ensure_future(engines[0].generate(request("y", [1, 2], "y")))
                    learner.update(mixed_batch(version))
                    assert all(learner.held().values())
                    assert not waiting.done()
                assert learner.held()["optimizer"] == 0
                assert learner.held()["weights"] > 0, "until the engines have them"
                async with colocation.sync_weights():
                    await engine.update_weights(version, learner.weights())
                assert (learner.held()["weights"] == 0) is weights
                assert (await waiting).version == (version if weights else (await waiting).version)
                assert colocation.metrics["colocation_offloaded_bytes"] > 0
            if several:
                assert (await engines[1].stats()).weight_bytes, "the other engine kept its weights"
            await engine.close()

    asyncio.run(main())


def test_engines_wake_up_when_the_learner_fails() -> None:
    async def main() -> None:
        learner, engine = make_learner(tiny()), EmbeddedEngine(tiny(), threads=1)

        async def compute(work: Any, *args: Any) -> Any:
            return work(*args)

        colocation = Colocation(engine, [0], learner, compute)
        with pytest.raises(ValueError, match="no luck"):
            async with colocation.training():
                raise ValueError("no luck")
        assert (await engine.generate(request("x", [1, 2, 3], "x"))).token_ids
        assert colocation.metrics == {}, "nothing is counted if nothing is moved"
        await engine.close()

    asyncio.run(main())


def test_the_learner_lends_its_device_between_updates() -> None:
    """Of two engines one is on the learner's device: in an update, its sessions continue on the other."""

    async def main() -> None:
        learner = make_learner(tiny())
        engine = RoutedEngine([EmbeddedEngine(tiny(), threads=1) for _ in range(2)])

        async def compute(work: Any, *args: Any) -> Any:
            return work(*args)

        colocation = Colocation(engine, [0], learner, compute, releases=("kv_cache",))
        before = 0
        for version in range(2):
            lent = await engine.generate(request(f"a{version}", [1, 2, 3], f"a{version}"))
            other = await engine.generate(request(f"b{version}", [1, 2, 3], f"b{version}"))
            both = len(lent.token_ids), len(other.token_ids)
            async with colocation.training():
                share = colocation.metrics["lent_tokens_frac"]
                prompt = [1, 2, 3, *lent.token_ids, 4]
                moved = await engine.generate(request(f"c{version}", prompt, f"a{version}"))
                learner.update(mixed_batch(version))
            async with colocation.sync_weights():
                await engine.update_weights(version + 1, learner.weights())
            assert (lent.version, other.version, moved.version) == (version, version, version)
            # What moved in the update before counts for the engine that was awake.
            assert share == pytest.approx(both[0] / (sum(both) + before))
            before = len(moved.token_ids)
            for session in ("a", "b"):
                await engine.forget(f"{session}{version}")
        await engine.close()

    asyncio.run(main())
