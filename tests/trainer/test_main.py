"""`train` and `atrain`: configs and overrides from Python, results, and cancelled calls."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from training import SMALL, Story, fast_versions, merged, write

from rollgym.config.loader import load
from rollgym.core.errors import UsageError
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.losses.policy import POLICY_LOSSES
from rollgym.trainer.main import TrainResult, atrain, override_words, run_training, train
from rollgym.trainer.tracking.jsonl import read_metrics

BANDIT: dict[str, Any] = {
    "envs": [{"id": "rollgym/Bandit-v0"}],
    "agent": {"instructions": True},
    "model": {"context": 256},
    "stop": {"steps": 2},
}


@pytest.fixture(autouse=True)
def _fast_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    fast_versions(monkeypatch)


def test_train_and_atrain_give_the_same_bandit_run(tmp_path: Path) -> None:
    config = merged(SMALL, BANDIT)
    result = train(config, out=tmp_path / "here", plain=True)

    async def main() -> TrainResult:
        ticks = 0
        training = asyncio.create_task(atrain(config, out=tmp_path / "there", plain=True))
        while not training.done():
            ticks += 1
            await asyncio.sleep(0.01)
        assert ticks > 5, "the caller's event loop keeps running"
        return await training

    other = asyncio.run(main())
    assert Story.of(tmp_path / "there") == Story.of(tmp_path / "here")
    assert (result.steps, result.ended) == (2, "all 2 steps are done")
    assert result.policy == tmp_path / "here" / "final"
    assert (result.policy / "model.safetensors").is_file()
    assert [line["phase"] for line in result.evaluations] == ["before", "training", "after"]
    values = json.loads(json.dumps(other.to_json()))
    assert values["run"] == str(tmp_path / "there")
    assert values["policy"] == str(other.policy)
    assert values["evaluations"] == other.evaluations == result.evaluations


def test_every_kind_of_config_and_override_gives_the_same_run(tmp_path: Path) -> None:
    path = write(tmp_path)
    words = ["stop.steps=1", "learner.learning_rate=1e-05"]
    run_training(str(path), words, tmp_path / "words", plain=True)
    expected = Story.of(tmp_path / "words")
    overrides: dict[str, Any] = {"stop": {"steps": 1}, "learner.learning_rate": 1e-05}
    sources: list[Any] = [str(path), path, SMALL, load(TrainConfig, path)]
    for number, source in enumerate(sources):
        train(source, out=str(tmp_path / str(number)), plain=True, **overrides)
        assert Story.of(tmp_path / str(number)) == expected


def test_overrides_become_words() -> None:
    assert override_words(
        {
            "stop": {"steps": 5, "success": None},
            "learner.learning_rate": 1e-05,
            "loss": {"name": POLICY_LOSSES["cispo"]},
            "model": {"path": Path("a b")},
            "imports": ["x"],
            "warm_start": {},
        }
    ) == [
        "stop.steps=5",
        "stop.success=null",
        "learner.learning_rate=1e-05",
        'loss.name="cispo"',
        'model.path="a b"',
        'imports=["x"]',
        "warm_start={}",
    ]
    with pytest.raises(UsageError, match="Settings cannot hold a value of type object: pass text"):
        override_words({"seed": object()})


def test_mistakes_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No config given"):
        train()
    with pytest.raises(UsageError, match="Did you mean learning_rate"):
        train(SMALL, out=tmp_path / "run", learner={"learning_rat": 1.0})
    with pytest.raises(UsageError, match="Nothing to resume"):
        asyncio.run(atrain(resume=True, out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_cancelled_atrain_saves_its_last_step_and_can_be_resumed(tmp_path: Path) -> None:
    config: dict[str, Any] = {**SMALL, "checkpoints": {"every": 1000}, "stop": {"steps": 6}}
    expected = train(config, out=tmp_path / "whole", plain=True)

    async def main() -> TrainResult:
        training = asyncio.create_task(atrain(config, out=tmp_path / "run", plain=True))
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.is_file() or not read_metrics(tmp_path / "run"):
            await asyncio.sleep(0.005)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        done = len(read_metrics(tmp_path / "run"))
        state = tmp_path / "run" / "checkpoints" / f"step-{done:08d}" / "state.json"
        assert 0 < json.loads(state.read_text())["step"] < 6
        return await atrain(out=tmp_path / "run", resume=True, trust_code=True, plain=True)

    assert asyncio.run(main()).steps == expected.steps == 6
    assert Story.of(tmp_path / "run").weights == Story.of(tmp_path / "whole").weights
