"""Whole training runs on Ray: the same as in one process, under every layout, and after a death."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from training import Story, fast_versions, write

from rollgym.config import load
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.console import Console
from rollgym.trainer.loop import train
from rollgym.trainer.run import Run
from rollgym.trainer.setup import Parts, open_parts
from rollgym.trainer.setup_ray import open_ray_parts

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
Open = Callable[[TrainConfig, Path], AbstractAsyncContextManager[Parts]]


def run_with(
    opened: Open, folder: Path, disturb: Callable[[Parts, Run], Any] | None = None, **changes: Any
) -> Path:
    """Run a small configuration; ``disturb`` goes on beside it."""
    folder.mkdir()
    config = load(TrainConfig, write(folder, **changes), ["name=small"])
    run = Run(config, folder / "run", Console(plain=True))

    async def main() -> None:
        async with opened(config, run.folder) as parts:
            beside = None if disturb is None else asyncio.create_task(disturb(parts, run))
            await train(parts, run)
            if beside is not None:
                await beside

    try:
        asyncio.run(main())
    finally:
        run.close()
    return run.folder


def test_a_run_on_ray_is_the_run_in_one_process_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_versions(monkeypatch)
    here = Story.of(run_with(open_parts, tmp_path / "here"))
    there = Story.of(run_with(open_ray_parts, tmp_path / "there", runtime="ray", gpus=1))
    assert there.weights == here.weights
    assert there.evaluations == here.evaluations
    assert [one["turns"] for one in there.episodes] == [one["turns"] for one in here.episodes]


@pytest.mark.parametrize(
    "devices",
    [
        {"layout": "split", "actor_train": "gpu[0]", "actor_infer": "gpu[1]"},
        {"layout": "overlapping", "actor_train": "gpu[0]", "actor_infer": "gpu[0-1]"},
    ],
    ids=["split", "overlapping"],
)
def test_other_layouts_learn_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: dict[str, str]
) -> None:
    fast_versions(monkeypatch)
    here = Story.of(run_with(open_parts, tmp_path / "here"))
    there = run_with(open_ray_parts, tmp_path / "there", runtime="ray", gpus=2, devices=devices)
    assert Story.of(there).weights == here.weights


def test_a_learner_that_is_killed_goes_on_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_versions(monkeypatch)
    here = Story.of(run_with(open_parts, tmp_path / "here", stop={"steps": 6}))

    async def kill(parts: Parts, run: Run) -> None:
        while run.progress.step < 3:
            await asyncio.sleep(0.01)
        remote: Any = parts.learner
        ray.kill(remote._worker.actors[0])

    there = run_with(open_ray_parts, tmp_path / "there", kill, runtime="ray", gpus=1, stop={"steps": 6})
    assert Story.of(there).weights == here.weights, "as if nothing had happened"


def test_a_run_that_loses_a_node_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes_of: Callable[..., Any]
) -> None:
    """Three nodes; the one with an engine and environments goes. No episode is lost or trained on twice."""
    fast_versions(monkeypatch)
    nodes = nodes_of(3, num_cpus=4, num_gpus=1)

    async def lose(parts: Parts, run: Run) -> None:
        while run.progress.step < 3:
            await asyncio.sleep(0.01)
        nodes.lose()

    folder = run_with(
        open_ray_parts,
        tmp_path / "there",
        lose,
        runtime="ray",
        address=nodes.address,
        rollout={"groups": 4, "group_size": 4, "workers": 0, "refills": 16},
        devices={"layout": "split", "actor_train": "gpu[0]", "actor_infer": "gpu[1-2]"},
        evaluation={"every": 0, "episodes": 4},
        stop={"steps": 10},
    )
    story = Story.of(folder)
    names = [one["spec"]["episode_id"] for one in story.episodes]
    assert len(names) == 10 * 4 * 4
    assert len(set(names)) == len(names)
    groups = [one["spec"]["group_id"] for one in story.episodes]
    assert all(groups.count(name) == 4 for name in set(groups))
    assert [line["step"] for line in story.metrics] == list(range(1, 11))
