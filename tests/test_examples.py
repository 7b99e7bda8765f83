"""Each example runs in a small form; the ones about agents and programs are tested beside those."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = [
    "warm_start.episodes=8", "warm_start.epochs=1", "rollout.groups=2", "rollout.group_size=2",
    "evaluation.episodes=4", "stop.steps=1", "tracking.tensorboard=false",
]  # fmt: skip


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
    from rollgym.trainer import credit as known
    from rollgym.trainer.credit import Trajectory

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
    example("custom_reward").main([*SMALL, "warm_start.until_success=null"])
    assert "after 1 steps" in capsys.readouterr().out
    (run,) = Path("runs").iterdir()
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    assert all("brevity" in episode["turns"][-1]["info"]["rewards"] for episode in episodes)
