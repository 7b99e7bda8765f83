"""Turns on one device: what leaves while the other works, and that it changes nothing that is learnt."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from learner_cases import make_learner, mixed_batch, tiny
from torch_models import request
from training import Story, fast_versions, write

from rollgym.config import load
from rollgym.engines.replicas import ReplicaEngine
from rollgym.engines.torch import TorchEngine
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.console import Console
from rollgym.trainer.handover import Handover
from rollgym.trainer.loop import train
from rollgym.trainer.run import Run
from rollgym.trainer.setup import LEAVES, open_parts


def run_with(folder: Path, seen: list[dict[str, float]], **changes: Any) -> Path:
    """A small run; what was moved in each of its hand-overs is added to ``seen``."""
    folder.mkdir()
    config = load(TrainConfig, write(folder, **changes), ["name=small"])
    run = Run(config, folder / "run", Console(plain=True))

    async def main() -> None:
        async with open_parts(config, run.folder) as parts:
            renew = type(parts).renew

            async def noted(self: Any, version: int) -> None:
                await renew(self, version)
                seen.append(dict(self.moved))

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(parts), "renew", noted)
                await train(parts, run)

    try:
        asyncio.run(main())
    finally:
        run.close()
    return run.folder


@pytest.mark.parametrize("offload", ["optimiser", "all"])
def test_a_run_that_makes_room_at_every_hand_over_learns_the_same(
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
    assert "handover_reloaded" in seen[0], "nothing had left yet"
    for step in seen:
        assert step["handover_seconds"] > 0
        assert step["handover_released"] > 0
        assert step["handover_offloaded"] > 0
    assert seen[1]["handover_reloaded"] == seen[0]["handover_offloaded"] == seen[2]["handover_reloaded"]


@pytest.mark.parametrize("offload", ["optimiser", "all"])
def test_engines_make_room_while_others_are_imitated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    fast_versions(monkeypatch)
    seen: list[dict[str, float]] = []
    lessons = {"agent": "lessons:Teacher", "episodes": 12, "epochs": 2, "batch": 4, "check_every": 2}
    more = {"warm_start": lessons, "stop": {"steps": 1}}
    plain = Story.of(run_with(tmp_path / "plain", [], **more))
    moved = Story.of(run_with(tmp_path / "moved", seen, devices={"offload": offload}, **more))
    assert moved.weights == plain.weights
    assert len(seen) == 4, "three times on the way of six batches, and one step"
    for step in seen:
        # Of what is cached there is nothing where nothing was played in between.
        assert step["handover_released"] > 0 or offload == "optimiser"
        assert step["handover_offloaded"] > 0
    left, back = seen[0]["handover_offloaded"], seen[1]["handover_reloaded"]
    assert left == back == seen[2]["handover_reloaded"], "moments and all: what left came back"
    # The optimizer starts afresh after imitation: of what left, the two moments of each weight are gone.
    assert seen[3]["handover_reloaded"] == (left / 3 if offload == "all" else 0)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("offload", ["optimiser", "all"])
def test_each_holds_its_memory_in_its_turn_only(offload: str, several: bool) -> None:
    leaves, releases = LEAVES[offload]
    weights = "weights" in releases

    async def main() -> None:
        learner = make_learner(tiny())
        engines = [TorchEngine(tiny(), threads=1) for _ in range(2 if several else 1)]
        engine: Any = ReplicaEngine(engines) if several else engines[0]
        with ThreadPoolExecutor(1) as thread:

            async def compute(work: Any, *args: Any) -> Any:
                return await asyncio.get_running_loop().run_in_executor(thread, work, *args)

            turns = Handover(engine, [0], learner, compute, leaves=leaves, releases=releases)
            for version in (1, 2):
                await engine.generate(request("x", [1, 2, 3], "x"))
                async with turns.training():
                    stats = await engines[0].stats()
                    assert stats.cache_bytes == 0
                    assert (stats.weight_bytes == 0) is weights
                    waiting = asyncio.ensure_future(engines[0].generate(request("y", [1, 2], "y")))
                    learner.update(mixed_batch(version))
                    assert all(learner.held().values())
                    assert not waiting.done()
                assert learner.held()["optimiser"] == 0
                assert learner.held()["weights"] > 0, "engines are to have them first"
                async with turns.renewing():
                    await engine.update_weights(version, learner.weights())
                assert (learner.held()["weights"] == 0) is weights
                assert (await waiting).version == (version if weights else (await waiting).version)
                assert turns.moved["handover_offloaded"] > 0
            if several:
                assert (await engines[1].stats()).weight_bytes, "the other one played on"
            await engine.close()

    asyncio.run(main())


def test_engines_go_on_when_the_learner_fails() -> None:
    async def main() -> None:
        learner, engine = make_learner(tiny()), TorchEngine(tiny(), threads=1)

        async def compute(work: Any, *args: Any) -> Any:
            return work(*args)

        turns = Handover(engine, [0], learner, compute)
        with pytest.raises(ValueError, match="no luck"):
            async with turns.training():
                raise ValueError("no luck")
        assert (await engine.generate(request("x", [1, 2, 3], "x"))).token_ids
        assert turns.moved == {}, "nothing is counted where nothing is to be moved"
        await engine.close()

    asyncio.run(main())
