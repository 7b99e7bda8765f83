"""What a batch loses on its way: played again where the machines failed, and said where it is missing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lessons
import pytest
from training import lines

from rollgym.trainer import loop

Run = Callable[..., Path]


def before_first_step(patch: pytest.MonkeyPatch, do: Callable[[], None]) -> None:
    """Do something once the first evaluation is over, and before the first step."""
    steps: list[int] = []
    train_step = loop.train_step

    async def spied(parts: Any, run: Any, scheduler: Any) -> bool:
        if not steps:
            do()
        steps.append(1)
        return await train_step(parts, run, scheduler)

    patch.setattr(loop, "train_step", spied)


def numbers(folder: Path, name: str) -> list[float]:
    return [line[name] for line in lines(folder / "metrics.jsonl")]


@pytest.mark.parametrize("when_short", ["keep", "drop"])
def test_a_lost_worker_costs_a_step_no_episode(
    train_here: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    when_short: str,
) -> None:
    """All episodes of the batch are in the worker that dies: more than may fail."""
    last_day = tmp_path / "last_day"
    before_first_step(monkeypatch, last_day.touch)
    folder = train_here(
        "run",
        envs=[{"id": "lessons:Dies", "kwargs": {"file": str(last_day)}}],
        rollout={"groups": 2, "group_size": 8, "workers": 1, "when_short": when_short},
        evaluation={"every": 0, "episodes": 1},
        stop={"steps": 2},
    )
    assert not last_day.exists()
    assert numbers(folder, "episodes") == [16.0, 16.0]
    assert numbers(folder, "episodes_missing") == [0.0, 0.0]
    retried = sum(numbers(folder, "infra_retries"))
    assert retried >= 14
    said = capsys.readouterr().err
    assert f"step 1: played {retried:.0f} episodes again that infrastructure lost: " in said
    assert "trains on" not in said


def test_a_step_with_fewer_episodes_than_asked_for_says_so(
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
