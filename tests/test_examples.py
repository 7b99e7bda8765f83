"""Each example runs in a small form; the ones about agents and programs are tested beside those."""

import asyncio
import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import SMALL_RUN

from rollgym.evaluation.run_results import load_run

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = list(SMALL_RUN)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Import an example, to be run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert text.startswith('"""')
    assert text.count("\n") < 100


def test_compare_agents(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example("compare_agents").main("rollgym/FrozenLake-v0", 10)
    expert, random, difference = capsys.readouterr().out.splitlines()
    assert expert.startswith("expert   1.000")
    assert random.startswith("random")
    assert "p = " in difference


def test_plan_devices(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example("plan_devices").main("7b", 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("7b on 16 H100: ")
    assert {line.split()[0] for line in lines[1:]} >= {"actor_train", "actor_infer", "reference"}


def test_custom_estimator(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from rollgym.trainer.advantages import Trajectory
    from rollgym.trainer.advantages import base as known

    monkeypatch.setattr(known, "ESTIMATORS", dict(known.ESTIMATORS))  # other tests go through all there are
    monkeypatch.delitem(sys.modules, "custom_estimator", raising=False)
    module = example("custom_estimator")

    def played(reward: float) -> Trajectory:
        return Trajectory(group="g", rewards=[reward], tokens=[2], terminated=True)  # type: ignore[arg-type]

    credit = module.by_rank([played(reward) for reward in (0.0, 5.0, 5.0, 9.0)])
    assert [one.tolist() for one in credit.advantages] == [[-1, -1], [0, 0], [0, 0], [1, 1]]
    module.main(SMALL)
    assert "held-out success: " in capsys.readouterr().out


def test_custom_reward(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    example("custom_reward").main(SMALL)
    assert "after 1 steps" in capsys.readouterr().out
    (run,) = Path("runs").iterdir()
    episodes = list(load_run(run).episodes)
    assert episodes
    assert all("brevity" in episode.turns[-1].info["rewards"] for episode in episodes)


def test_custom_environment(tmp_path: Path) -> None:
    """By `--env-module`, in worker processes, and by the entry point of an installed package."""
    ours = tmp_path / "lights-1.0.dist-info"
    ours.mkdir()
    (ours / "METADATA").write_text("Metadata-Version: 2.1\nName: lights\nVersion: 1.0\n")
    (ours / "entry_points.txt").write_text("[rollgym.envs]\nlights = custom_environment:register\n")
    play = [sys.executable, "-m", "rollgym", "eval", "lights/Lights-v0", "--episodes", "20", "--json"]
    for words, paths in (
        (["--agent", "expert", "--env-module", "custom_environment", "--workers", "1"], [EXAMPLES]),
        (["--agent", "expert"], [EXAMPLES, tmp_path]),
    ):
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        done = subprocess.run([*play, *words], env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["success_rate"] == 1.0


def test_the_custom_environment_keeps_the_contract(example: Any, rollgym_command: Any) -> None:
    example("custom_environment")
    ran = rollgym_command("check", "lights/Lights-v0", "--env-module", "custom_environment", "--quick")
    assert ran.code == 0, ran.out


def test_gymnasium_env(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    example("gymnasium_env").main()
    said = capsys.readouterr().out
    assert "The rewards add up to " in said
    assert "(valid: False" in said


def test_chat_agent_against_a_served_model(example: Any, tmp_path: Path) -> None:
    """A real model with random weights, behind the endpoint that `rollgym serve` opens."""
    pytest.importorskip("torch")
    pytest.importorskip("uvicorn")
    from rollgym.chat import load_tokenizer
    from rollgym.engines.embedded.engine import EmbeddedEngine
    from rollgym.serve import RecordingServer
    from rollgym.trainer.builtin_policy.model import make_policy

    lake = "rollgym/FrozenLake-v0"
    policy = make_policy([lake], tmp_path / "lake", size="tiny", context=1024)
    module = example("chat_agent")

    async def play() -> dict[str, Any]:
        engine = EmbeddedEngine(policy.path)
        async with RecordingServer(engine, load_tokenizer(policy.path)) as server:
            options = Namespace(
                model=server.options.model,
                base_url=server.base_url,
                env=lake,
                episodes=2,
                turns=2,
                concurrency=2,
            )
            found: dict[str, Any] = await module.evaluate(options)
        await engine.close()
        return found

    counts = asyncio.run(play())
    assert (counts["episodes"], counts["scored"], counts["requests"]) == (2, 2, 4)


def test_train_sokoban(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    folder = example("train_sokoban").main(SMALL, episodes=2)
    assert "as an agent, on the test split: " in capsys.readouterr().out
    assert (folder / "report.html").stat().st_size > 10_000


def test_train_webshop(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tantivy")
    folder = example("train_webshop").main(SMALL, episodes=2)
    assert "the last visit: " in capsys.readouterr().out
    assert (folder / "report.html").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_ray_plan(tmp_path: Path) -> None:
    """In a process of its own: what Ray leaves behind there ends with it."""
    pytest.importorskip("ray")
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "ray_plan.py"), *SMALL], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "layout: split" in run.stdout
    assert "after 1 steps" in run.stdout
