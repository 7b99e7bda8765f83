"""Lost episodes of a batch: replayed after infrastructure failures, reported if they stay missing."""

from collections.abc import Callable
from pathlib import Path

import lessons
import pytest
from training import lines

from rollgym.trainer.loop import TrainLoop

Run = Callable[..., Path]


def before_first_step(patch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Call ``do`` after the first evaluation, before the first step."""
    steps: list[int] = []
    train_step = TrainLoop.train_step

    async def spied(self: TrainLoop) -> bool:
        if not steps:
            do()
        steps.append(1)
        return await train_step(self)

    patch.setattr(TrainLoop, "train_step", spied)


def numbers(folder: Path, name: str) -> list[float]:
    return [line[name] for line in lines(folder / "metrics.jsonl")]


@pytest.mark.parametrize("incomplete_groups", ["keep", "drop"])
def test_a_lost_worker_loses_no_episode(
    train_here: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    incomplete_groups: str,
) -> None:
    """All episodes of the batch are in the worker that dies: more than may fail."""
    last_day = tmp_path / "last_day"
    before_first_step(monkeypatch, last_day.touch)
    folder = train_here(
        "run",
        envs=[{"id": "lessons:Dies", "kwargs": {"file": str(last_day), "crowd": 16}}],
        rollout={"groups": 2, "group_size": 8, "workers": 1, "incomplete_groups": incomplete_groups},
        evaluation={"every": 0, "episodes": 1},
        stop={"steps": 2},
    )
    assert not last_day.exists()
    assert numbers(folder, "episodes") == [16.0, 16.0]
    assert numbers(folder, "episodes_missing") == [0.0, 0.0]
    retried = sum(numbers(folder, "infra_retries"))
    assert retried >= 14
    said = capsys.readouterr().err
    assert f"step 1: replayed {retried:.0f} episodes lost to infrastructure: " in said
    assert "trains on" not in said


def test_a_step_with_missing_episodes_is_reported(
    train_here: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before_first_step(monkeypatch, lambda: setattr(lessons.Breaks, "often", 3))
    folder = train_here(
        "run",
        envs=[{"id": "lessons:Breaks"}],
        evaluation={"every": 0, "episodes": 1},
        stop={"steps": 2},
        rollout={"max_in_flight": 8},
    )
    assert numbers(folder, "episodes_missing") == [1.0, 0.0]
    assert numbers(folder, "infra_retries") == [0.0, 0.0]
    said = capsys.readouterr().err
    assert "step 1 trains on 7 of 8 episodes, because 1 failed too often: " in said
    assert said.count("trains on") == 1
