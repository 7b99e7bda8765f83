"""A run that is killed at any moment and resumed ends with the same bits as an uninterrupted one.

The commands run in separate processes (tests/fixtures/forge.py), which get a real signal: at an exact moment
(the n-th call of a function), or at a random one.
"""

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

import pytest
from training import Forge, Story, write

from rollgym.core.errors import ResultsError

UPDATE = "rollgym.trainer.learner.learner:Learner.update"
SYNC = "rollgym.trainer.runtime:Components.sync_weights"
EPISODES = "rollgym.trainer.tracking.jsonl:RunLogger.log_episodes"
EVALUATED = "rollgym.trainer.tracking.jsonl:RunLogger.log_evaluation"
SUMS = "rollgym.trainer.tracking.checkpoint:write_json"
TAKE = "rollgym.rollout.scheduler:Scheduler.take"
EVALUATE = "rollgym.rollout.scheduler:Scheduler.evaluate"
NAME = "rollgym.trainer.tracking.checkpoint:_replace"
SAVE = "rollgym.trainer.learner.learner:Learner.save"
MODEL = "rollgym.trainer.builtin_policy.model:_save_model"
SUMMARY = "rollgym.trainer.train_run:write_json"

WARM: dict[str, Any] = {
    "warm_start": {"agent": "lessons:Teacher", "episodes": 6, "epochs": 3, "batch": 3, "learning_rate": 1e-4},
    "stop": {"steps": 5},
    "checkpoints": {"every": 2},
    "evaluation": {"every": 2},
}


def ended(forge: Forge, folder: Path, *, words: tuple[str, ...] = ()) -> Story:
    """Resume until the end."""
    code = forge.run(folder, "train", *words, "--resume", "--trust-code", "--out", "run")
    assert code == 0, (folder / "err.txt").read_text()
    return Story.of(folder / "run")


def whole(forge: Forge, folder: Path, **changes: Any) -> Story:
    """An uninterrupted run."""
    folder.mkdir()
    write(folder, **changes)
    assert forge.run(folder, "train", "small.yaml", "--out", "run") == 0, (folder / "err.txt").read_text()
    return Story.of(folder / "run")


def same(story: Story, expected: Story) -> None:
    """Compare piece by piece, for a shorter message."""
    assert story.weights == expected.weights
    assert story.metrics == expected.metrics
    assert story.evaluations == expected.evaluations
    assert story.episodes == expected.episodes
    assert story.summary == expected.summary


@pytest.fixture(scope="module")
def undisturbed(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return whole(forge, tmp_path_factory.mktemp("whole") / "w", **WARM)


@pytest.fixture(scope="module")
def plain(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Undisturbed as well, without a warm start."""
    return whole(forge, tmp_path_factory.mktemp("plain") / "w")


def test_a_run_killed_and_resumed_many_times_ends_the_same(
    forge: Forge, tmp_path: Path, undisturbed: Story
) -> None:
    """Rule 35."""
    write(tmp_path, **WARM)
    words: tuple[str, ...] = ("train", "small.yaml", "--out", "run")
    for moment in (
        (SYNC, 2),  # in the warm start
        (NAME, 1),  # before the first checkpoint has its name
        (EPISODES, 1),  # between a step's metrics and its episodes
        (SUMS, 2),  # in the middle of a checkpoint
        (UPDATE, 1),  # between a checkpoint and the next step
        (EVALUATED, 2),  # after the last evaluation
        (SUMMARY, 2),  # before the summary is written, the last thing of all
    ):
        assert forge.run(tmp_path, *words, at=moment) == -SIGKILL, (
            moment,
            (tmp_path / "err.txt").read_text(),
        )
        words = ("train", "--resume", "--trust-code", "--out", "run")
    same(ended(forge, tmp_path), undisturbed)


MOMENTS = [(MODEL, 1), (EVALUATED, 1), (UPDATE, 3), (SAVE, 1), (SAVE, 2), (NAME, 2), (NAME, 3), (EPISODES, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS, ids=[f"{place.rsplit(':')[1]}-{call}" for place, call in MOMENTS])
def test_a_run_killed_once_at_each_moment_ends_the_same(
    forge: Forge, tmp_path: Path, undisturbed: Story, moment: tuple[str, int]
) -> None:
    """Rule 35."""
    write(tmp_path, **WARM)
    assert forge.run(tmp_path, "train", "small.yaml", "--out", "run", at=moment) == -SIGKILL
    same(ended(forge, tmp_path), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_killed_at_twenty_random_moments_ends_the_same(
    forge: Forge, tmp_path: Path, workers: int
) -> None:
    """Rule 35."""
    settings = {**WARM, "stop": {"steps": 60}, "rollout": {"workers": workers}}
    expected = whole(forge, tmp_path / "w", **settings)
    write(tmp_path, **settings)
    rng = random.Random(7)
    killed = 0
    while killed < 20:
        begun = (tmp_path / "run" / "manifest.json").exists()
        words = ("--resume", "--trust-code") if begun else ("small.yaml",)
        with forge.started(tmp_path, "train", *words, "--out", "run") as process:
            time.sleep(rng.uniform(0.1, 1.5))
            with suppress(ProcessLookupError):
                os.kill(process, SIGKILL)
        killed += forge.code == -SIGKILL
        if forge.code == 0:
            same(Story.of(tmp_path / "run"), expected)
            shutil.rmtree(tmp_path / "run")
    if not (tmp_path / "run" / "manifest.json").exists():
        assert forge.run(tmp_path, "train", "small.yaml", "--out", "run") == 0
    same(ended(forge, tmp_path), expected)


def test_a_run_killed_before_its_first_checkpoint_starts_over(
    forge: Forge, tmp_path: Path, plain: Story
) -> None:
    """Rule 35."""
    write(tmp_path)
    assert forge.run(tmp_path, "train", "small.yaml", "--out", "run", at=(SAVE, 1)) == -SIGKILL
    assert (tmp_path / "run" / "evaluations.jsonl").read_text(), "something to rewind"
    same(ended(forge, tmp_path), plain)


def test_the_curriculum_resumes_at_its_stage(forge: Forge, tmp_path: Path) -> None:
    """Rule 35."""
    settings = {
        "envs": [{"id": "lessons:Granted"}, {"id": "lessons:Yes"}],
        "curriculum": {"window": 2, "advance_at": 0.5},
        "checkpoints": {"every": 1},
        "evaluation": {"every": 0, "episodes": 1},
    }
    expected = whole(forge, tmp_path / "w", **settings)
    write(tmp_path, **settings)
    for number, moment in enumerate([(UPDATE, 2), (UPDATE, 2), (UPDATE, 2)]):
        words = ("--resume", "--trust-code") if number else ("small.yaml",)
        assert forge.run(tmp_path, "train", *words, "--out", "run", at=moment) == -SIGKILL
    story = ended(forge, tmp_path)
    assert {one["spec"]["env_id"] for one in story.episodes} == {"lessons:Granted", "lessons:Yes"}
    same(story, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"estimator": "gae", "learner": {"critic": "separate"}},
        {"loss": {"name": "grpo", "kl_coef": 0.1, "kl_target": 0.01}},
        {"loss": {"name": "grpo", "entropy_coef": 0.1, "entropy_target": 9.0}},
        {"rollout": {"filter_zero_variance": True, "max_skipped": 2, "max_retries_per_group": 0}},
        {"learner": {"schedule": "cosine", "warmup_steps": 3, "epochs": 2}},
        {"learner": {"lora": {"rank": 2}}},
    ],
    ids=["critic", "adaptive KL", "adaptive entropy", "skipping", "schedule", "lora"],
)
def test_all_training_state_is_in_the_checkpoint(
    forge: Forge, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Rule 35."""
    expected = whole(forge, tmp_path / "w", **changes)
    write(tmp_path, **changes)
    assert forge.run(tmp_path, "train", "small.yaml", "--out", "run", at=(UPDATE, 4)) == -SIGKILL
    same(ended(forge, tmp_path), expected)


@pytest.mark.parametrize(
    ("moment", "number", "kept"),
    [
        ((UPDATE, 3), SIGINT, "checkpoint of step 3 saved"),
        ((TAKE, 2), SIGINT, "checkpoint of step 1 saved"),
        ((EVALUATE, 2), SIGINT, "checkpoint of step 2 saved"),
        ((SYNC, 1), SIGTERM, "checkpoint of step 1 saved"),
        ((SAVE, 2), SIGINT, "checkpoint of step 2 saved"),
    ],
    ids=["while updating", "while generating", "while evaluating", "termination", "while saving"],
)
def test_a_stopped_run_prints_how_to_resume_and_resumes(
    forge: Forge, tmp_path: Path, plain: Story, moment: tuple[str, int], number: int, kept: str
) -> None:
    write(tmp_path)
    assert (
        forge.run(tmp_path, "train", "small.yaml", "--out", "run", at=moment, signal=number) == 128 + number
    )
    said = (tmp_path / "err.txt").read_text().strip().splitlines()[-1]
    assert said.startswith("rollgym: Stopped after step ")
    assert kept in said
    assert said.endswith("Resume with `rollgym train --resume --out run --trust-code`.")
    assert "Traceback" not in (tmp_path / "err.txt").read_text()
    same(ended(forge, tmp_path), plain)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    forge: Forge, tmp_path: Path, plain: Story
) -> None:
    write(tmp_path)
    assert forge.run(tmp_path, "train", "small.yaml", "--out", "run", at=(UPDATE, 4)) == -SIGKILL
    newest = tmp_path / "run" / "checkpoints" / "step-00000002"
    (newest / "optimizer.pt").write_bytes(b"rubbish")
    same(ended(forge, tmp_path), plain)
    said = (tmp_path / "err.txt").read_text()
    assert "step-00000002 is damaged: optimizer.pt was changed after it was written" in said
    assert "resuming after step 0" in said


Run = Callable[..., Path]


def test_a_finished_run_resumed_to_more_steps_is_as_if_it_never_ended(train_here: Run) -> None:
    """Rule 35."""
    expected = Story.of(train_here("whole", stop={"steps": 5}))
    train_here("run", stop={"steps": 3})
    same(Story.of(train_here("run", stop={"steps": 5}, resume=True)), expected)


def test_a_run_resumed_to_more_steps_remembers_how_many(train_here: Run, tmp_path: Path) -> None:
    from rollgym.trainer.main import run_training

    train_here("run", stop={"steps": 1})
    train_here("run", stop={"steps": 3}, resume=True)
    summary = run_training(None, (), tmp_path / "run", resume=True, trust_code=True, plain=True)
    assert summary["ended"] == "all 3 steps are done"


def test_a_finished_run_stays_the_same_when_it_is_resumed(train_here: Run) -> None:
    folder = train_here("run", stop={"steps": 3})
    before = Story.of(folder)
    same(Story.of(train_here("run", stop={"steps": 3}, resume=True)), before)


def test_training_time_is_counted_over_resumptions(train_here: Run) -> None:
    folder = train_here("run", stop={"steps": 1})
    state = folder / "checkpoints" / "step-00000001" / "state.json"
    first = json.loads(state.read_text())["seconds"]
    assert first > 0
    folder = train_here("run", stop={"steps": 2}, resume=True)
    assert (
        json.loads((folder / "checkpoints" / "step-00000002" / "state.json").read_text())["seconds"] > first
    )


def test_a_run_with_only_damaged_checkpoints_cannot_resume(train_here: Run) -> None:
    folder = train_here("run")
    before = (folder / "metrics.jsonl").read_bytes()
    for place in (folder / "checkpoints").glob("step-*"):
        (place / "learner.safetensors").write_bytes(b"")
    with pytest.raises(ResultsError, match="All checkpoints of this run are damaged"):
        train_here("run", resume=True)
    assert (folder / "metrics.jsonl").read_bytes() == before, "no line is dropped"
