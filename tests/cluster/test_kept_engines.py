"""Engines that outlive a driver that was killed: the next one uses them again, or they end by themselves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training import Story, fast_versions, write

from rollgym.cluster.connect import connect
from rollgym.cluster.kept_engines import RECORD, EngineRecord
from rollgym.trainer.main import run_training

ray: Any = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)
DRIVER = """
import os, signal, sys
from pathlib import Path
from rollgym.trainer.main import run_training
from rollgym.trainer.train_run import TrainRun

config, out, method, step = sys.argv[1:]
before = getattr(TrainRun, method)

async def then_die(run, *args):
    result = await before(run, *args)
    if run.state.step == int(step):
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(TrainRun, method, then_die)
run_training(Path(config), [], Path(out), plain=True)
"""
"""A run that kills itself after a call of a method in one of its steps."""


@pytest.fixture(scope="module")
def nodes(nodes_of: Callable[..., Any]) -> Any:
    return nodes_of(2, num_cpus=4, num_gpus=1)


def config_of(folder: Path, nodes: Any, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    ray_settings = {"address": nodes.address, **changes.pop("ray", {})}
    apart = {"layout": "split", "actor_train": "gpu[0]", "actor_infer": "gpu[1]"}
    return write(folder, runtime="ray", name="small", ray=ray_settings, devices=apart, **changes)


def killed(config: Path, method: str = "log_step", step: int = 3) -> Path:
    """Start a run that dies; returns its folder."""
    out = config.with_name("run")
    words = [sys.executable, "-c", DRIVER, str(config), str(out), method, str(step)]
    paths = os.pathsep.join(filter(None, sys.path))
    died = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=600
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    return out


def resumed(folder: Path, *settings: str) -> Story:
    run_training(None, settings, folder, resume=True, plain=True, trust_code=True)
    return Story.of(folder)


def engine_pids(nodes: Any, folder: Path) -> list[int]:
    """The process ids of the engines that the record names."""
    record = EngineRecord.read(folder)
    assert record is not None
    with connect(nodes.address):
        actors = [ray.get_actor(name, "rollgym") for name in filter(None, record.engines)]
        return [ray.get(one.__ray_call__.remote(lambda _: __import__("os").getpid())) for one in actors]


def left_over(nodes: Any) -> tuple[list[str], list[str], float]:
    """Names of actors and groups on the cluster, and the free GPUs."""
    from ray.util import list_named_actors, placement_group_table

    with connect(nodes.address):
        actors = [one["name"] for one in list_named_actors(all_namespaces=True)]
        groups = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
        return actors, groups, ray.available_resources().get("GPU", 0.0)


def wait_until_nothing_is_left(nodes: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := left_over(nodes)) != ([], [], 2.0):
        assert time.monotonic() < until, left
        time.sleep(0.5)


def test_a_resumed_run_uses_the_engine_of_the_killed_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    fast_versions(monkeypatch)
    seen: list[list[int]] = []
    write_record = EngineRecord.write

    def note(record: EngineRecord, folder: Path) -> None:
        write_record(record, folder)
        if record.engines:
            actors = [ray.get_actor(name, "rollgym") for name in filter(None, record.engines)]
            pids = [one.__ray_call__.remote(lambda _: __import__("os").getpid()) for one in actors]
            seen.append(ray.get(pids))

    folder = killed(config_of(tmp_path / "there", nodes))
    before = engine_pids(nodes, folder)
    shutil.copytree(folder, tmp_path / "copy")
    monkeypatch.setattr(EngineRecord, "write", note)
    again = resumed(folder)
    assert len(before) == 1
    assert seen == [before]
    assert "Rejoined 1 of 1 engines" in capfd.readouterr().err
    assert not (folder / RECORD).exists()
    wait_until_nothing_is_left(nodes, 20)

    fresh = resumed(tmp_path / "copy", "ray.keep_engines=0")
    assert again.weights == fresh.weights
    assert again.metrics == fresh.metrics
    assert "Rejoined" not in capfd.readouterr().err
    assert seen == [before], "nothing is recorded without it"


@pytest.mark.slow
def test_engines_that_no_driver_comes_back_for_end(tmp_path: Path, nodes: Any) -> None:
    folder = killed(config_of(tmp_path, nodes, ray={"keep_engines": 8}))
    began = time.monotonic()
    actors, groups, _ = left_over(nodes)
    assert len(actors) == 2, "the engine and its lease"
    assert len(groups) == 1
    wait_until_nothing_is_left(nodes, 60)
    assert time.monotonic() - began > 4
    assert resumed(folder).summary["steps"] == 4


@pytest.mark.slow
def test_an_engine_that_died_too_is_started_in_its_place(
    tmp_path: Path, nodes: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = killed(config_of(tmp_path, nodes))
    (pid,) = engine_pids(nodes, folder)
    os.kill(pid, signal.SIGKILL)
    assert resumed(folder).summary["steps"] == 4
    assert "Rejoined 0 of 1 engines" in capfd.readouterr().err
    wait_until_nothing_is_left(nodes, 20)


@pytest.mark.slow
def test_a_hung_engine_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rollgym.cluster.engine.ANSWER_SECONDS", 5.0)
    folder = killed(config_of(tmp_path, nodes))
    (pid,) = engine_pids(nodes, folder)
    os.kill(pid, signal.SIGSTOP)
    assert resumed(folder).summary["steps"] == 4
    assert "Rejoined 0 of 1 engines" in capfd.readouterr().err
    wait_until_nothing_is_left(nodes, 20)


@pytest.mark.slow
def test_without_a_checkpoint_a_kept_engine_starts_from_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """It has the weights of the warm start, after which the driver was killed."""
    fast_versions(monkeypatch)
    warm = {"agent": "lessons:Teacher", "episodes": 6, "epochs": 3, "batch": 3, "learning_rate": 0.005}
    more = {"warm_start": warm, "stop": {"steps": 2}}
    config = config_of(tmp_path / "there", nodes, **more)
    folder = killed(config, "keep_reference", 0)
    assert not list((folder / "checkpoints").glob("step-*"))
    again = resumed(folder)
    assert "Rejoined 1 of 1 engines" in capfd.readouterr().err
    (tmp_path / "here").mkdir()
    local = write(tmp_path / "here", name="small", **more)
    run_training(local, (), tmp_path / "here" / "run", plain=True)
    here = Story.of(tmp_path / "here" / "run")
    assert again.evaluations == here.evaluations
    assert again.weights == here.weights


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: Any, fails: bool
) -> None:
    config = config_of(tmp_path, nodes, stop={"steps": 1})
    if fails:

        async def fail(*_: Any) -> None:
            raise ArithmeticError

        monkeypatch.setattr("rollgym.trainer.train_run.TrainRun.log_step", fail)
        with pytest.raises(ArithmeticError):
            run_training(config, (), tmp_path / "run", plain=True)
    else:
        run_training(config, (), tmp_path / "run", plain=True)
    assert not (tmp_path / "run" / RECORD).exists()
    wait_until_nothing_is_left(nodes, 20)


def test_a_record_is_read_only_if_all_its_names_have_its_prefix(tmp_path: Path) -> None:
    prefix = f"rollgym-{'0a' * 16}-"
    record = EngineRecord(prefix, {"code": "x"}, {"1": f"{prefix}devices-1"}, (f"{prefix}engine-1", None))
    assert EngineRecord.read(tmp_path) is None
    record.write(tmp_path)
    known = EngineRecord.read(tmp_path)
    assert known is not None
    assert (known.prefix, known.groups, tuple(known.engines)) == (prefix, record.groups, record.engines)
    for change in (
        {"prefix": "rollgym-"},
        {"prefix": ""},
        {"prefix": None},
        {"groups": {"1": "another"}},
        {"engines": ["another"]},
        {"engines": 3},
        {"unknown": 1},
    ):
        values = json.loads((tmp_path / RECORD).read_text()) | change
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / RECORD).write_text(json.dumps(values))
        assert EngineRecord.read(tmp_path / "other") is None, change
