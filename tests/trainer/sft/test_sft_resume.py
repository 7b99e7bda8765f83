"""A fine-tuning run that is killed at any moment and resumed ends with the same bits."""

import json
from pathlib import Path
from signal import SIGINT, SIGKILL
from typing import Any

import pytest
from training import Forge, Story
from tuning import write_chats, write_config

UPDATE = "rollgym.trainer.learner.learner:Learner.update"
SYNC = "rollgym.trainer.runtime:Components.sync_weights"
EVALUATED = "rollgym.trainer.tracking.jsonl:RunLogger.log_evaluation"
METRICS = "rollgym.trainer.tracking.jsonl:RunLogger.log_metrics"
SUMS = "rollgym.trainer.tracking.checkpoint:write_json"
NAME = "rollgym.trainer.tracking.checkpoint:_replace"
SAVE = "rollgym.trainer.learner.learner:Learner.save"
PLAY = "rollgym.trainer.imitation.warm_start:run_episodes"
DATA = "rollgym.trainer.sft.prepare:write_json"
SUMMARY = "rollgym.trainer.train_run:write_json"

SETTINGS: dict[str, Any] = {
    "data": {"agent": "random", "episodes": 12, "mistakes": 0.2},
    "learner": {"schedule": "cosine", "warmup_steps": 2},
    "validation": {"fraction": 0.2, "every": 2},
}


def start(forge: Forge, folder: Path, **how: Any) -> int:
    return forge.run(folder, "sft", "small.yaml", "--out", "run", **how)


def resume(forge: Forge, folder: Path, **how: Any) -> int:
    return forge.run(folder, "sft", "--resume", "--trust-code", "--out", "run", **how)


@pytest.fixture(scope="module")
def undisturbed(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("whole")
    write_config(folder, **SETTINGS)
    assert start(forge, folder) == 0, (folder / "err.txt").read_text()
    return Story.of(folder / "run")


def test_a_run_killed_and_resumed_many_times_ends_the_same(
    forge: Forge, tmp_path: Path, undisturbed: Story
) -> None:
    """Rule 35."""
    write_config(tmp_path, **SETTINGS)
    moments = [
        (PLAY, 1),  # while demonstrations are played
        (DATA, 1),  # before the report on the data is written
        (NAME, 1),  # before the first checkpoint has its name
        (METRICS, 2),  # between an optimizer step and its metrics
        (SUMS, 2),  # in the middle of a checkpoint
        (UPDATE, 2),  # between two steps
        (SYNC, 2),  # before an evaluation
        (EVALUATED, 1),
        (SUMMARY, 2),  # before the summary is written, the last thing of all
    ]
    for number, moment in enumerate(moments):
        run = resume if number else start
        code = run(forge, tmp_path, at=moment)
        assert code == -SIGKILL, (moment, (tmp_path / "err.txt").read_text())
    assert resume(forge, tmp_path) == 0, (tmp_path / "err.txt").read_text()
    assert Story.of(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("moment", [(UPDATE, 3), (SAVE, 2)], ids=["update", "save"])
def test_ctrl_c_saves_the_last_finished_step(
    forge: Forge, tmp_path: Path, undisturbed: Story, moment: tuple[str, int]
) -> None:
    write_config(tmp_path, **SETTINGS)
    assert start(forge, tmp_path, at=moment, signal=SIGINT) == 130
    said = (tmp_path / "err.txt").read_text()
    assert f"checkpoint of step {3 if moment[0] == UPDATE else 2} saved" in said
    assert "Resume with `rollgym sft --resume --out run --trust-code`" in said
    assert resume(forge, tmp_path) == 0
    assert Story.of(tmp_path / "run") == undisturbed


def test_data_that_changed_are_not_resumed_with(forge: Forge, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 12)
    write_config(tmp_path, data={"agent": None, "files": ["chats.jsonl"]})
    assert start(forge, tmp_path, at=(UPDATE, 4)) == -SIGKILL
    good = chats.read_text()
    chats.write_text(good + good.splitlines()[0] + "\n")
    assert resume(forge, tmp_path) == 2
    assert "chats.jsonl has changed since the run in run was started" in (tmp_path / "err.txt").read_text()
    chats.write_text(good)
    assert resume(forge, tmp_path) == 0


def test_settings_that_changed_are_not_resumed_with(forge: Forge, tmp_path: Path) -> None:
    write_config(tmp_path)
    assert start(forge, tmp_path, at=(UPDATE, 4)) == -SIGKILL
    assert forge.run(tmp_path, "sft", "small.yaml", "batch_size=3", "--resume", "--out", "run") == 2
    assert "batch_size: 4 / 3" in (tmp_path / "err.txt").read_text()
    words = ("sft", "small.yaml", "checkpoints.every=1", "--resume", "--out", "run")
    assert forge.run(tmp_path, *words) == 0, (tmp_path / "err.txt").read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 6


@pytest.mark.slow
def test_without_environments_a_run_resumes_as_well(forge: Forge, tmp_path: Path) -> None:
    """Rule 35, with LoRA and an early stop."""
    pytest.importorskip("peft")
    write_chats(tmp_path / "chats.jsonl", 12)
    write_config(tmp_path, stop={"steps": 0}, evaluation={"every": 0, "episodes": 1})
    assert forge.run(tmp_path, "sft", "small.yaml", "--out", "made") == 0
    write_config(
        tmp_path,
        envs=[],
        data={"agent": None, "files": ["chats.jsonl"]},
        model={"path": "made/model"},
        learner={"lora": {"rank": 2}},
        validation={"fraction": 0.25, "every": 1},
        stop={"patience": 2},
    )
    assert forge.run(tmp_path, "sft", "small.yaml", "--out", "whole") == 0, (tmp_path / "err.txt").read_text()
    for number, moment in enumerate([(NAME, 1), (UPDATE, 2), (UPDATE, 3), (SAVE, 2)]):
        run = resume if number else start
        assert run(forge, tmp_path, at=moment) == -SIGKILL, moment
    assert resume(forge, tmp_path) == 0
    assert Story.of(tmp_path / "run") == Story.of(tmp_path / "whole")
