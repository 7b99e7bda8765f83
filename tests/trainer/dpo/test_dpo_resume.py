"""A run on preference pairs that is killed at any moment and resumed ends with the same bits."""

from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import pytest
from preferences import write_config, write_pairs
from training import Forge, Story

LEARNER = "rollgym.trainer.learner.learner:Learner"
SETTINGS: dict[str, Any] = {
    "data": {"episodes": 64},
    "learner": {"schedule": "cosine", "warmup_steps": 2},
    "validation": {"fraction": 0.2, "every": 2},
    "loss": {"label_smoothing": 0.1, "sft_weight": 0.1},
    "stop": {"steps": 6},
}


def start(forge: Forge, folder: Path, **how: Any) -> int:
    return forge.run(folder, "dpo", "small.yaml", "--out", "run", **how)


def resume(forge: Forge, folder: Path, **how: Any) -> int:
    return forge.run(folder, "dpo", "--resume", "--trust-code", "--out", "run", **how)


@pytest.fixture(scope="module")
def undisturbed(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_config(folder, **SETTINGS)
    assert start(forge, folder) == 0, (folder / "err.txt").read_text()
    return folder / "run"


def test_a_run_killed_and_resumed_many_times_ends_the_same(
    forge: Forge, tmp_path: Path, undisturbed: Path
) -> None:
    """Rule 35."""
    write_config(tmp_path, **SETTINGS)
    moments = [
        ("rollgym.trainer.dpo.loop:replacing", 1),  # before the reference's log-probs are stored
        ("rollgym.trainer.tracking.checkpoint:_replace", 1),  # before the first checkpoint has its name
        ("rollgym.trainer.tracking.jsonl:RunLogger.log_metrics", 2),
        (f"{LEARNER}.update", 2),
        (f"{LEARNER}.save", 2),
        ("rollgym.trainer.train_run:write_json", 2),  # before the summary is written
    ]
    for number, moment in enumerate(moments):
        run = resume if number else start
        code = run(forge, tmp_path, at=moment)
        assert code == -SIGKILL, (moment, (tmp_path / "err.txt").read_text())
    assert resume(forge, tmp_path) == 0, (tmp_path / "err.txt").read_text()
    assert Story.of(tmp_path / "run") == Story.of(undisturbed)
    stored, expected = (
        np.load(folder / "reference_logprobs.npy") for folder in (tmp_path / "run", undisturbed)
    )
    assert np.array_equal(stored, expected)


def test_a_run_without_its_reference_is_not_resumed(forge: Forge, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", 12)
    write_config(tmp_path, data={"agent": None, "files": ["pairs.jsonl"]})
    assert start(forge, tmp_path, at=(f"{LEARNER}.update", 4)) == -SIGKILL
    path = tmp_path / "run" / "reference_logprobs.npy"
    content = path.read_bytes()
    path.unlink()
    assert resume(forge, tmp_path) == 2
    assert (
        "Cannot resume the run in run: it has no reference_logprobs.npy" in (tmp_path / "err.txt").read_text()
    )
    path.write_bytes(content[:-8])
    assert resume(forge, tmp_path) == 2
    assert "reference_logprobs.npy" in (tmp_path / "err.txt").read_text()
    path.write_bytes(content)
    assert resume(forge, tmp_path) == 0
