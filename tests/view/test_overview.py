"""The numbers of the first page, checked by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import failed_episode, make_episode

from rollgym.evaluation.stats import wilson
from rollgym.view import RunView
from rollgym.view.overview import curves, overview, thin, time_split

MakeRun = Callable[..., Path]


def look(folder: Path) -> dict[str, object]:
    run = RunView(folder)
    run.follow(final=True)
    return overview(run)


def test_success_has_its_interval_and_failures_have_no_score(make_run: MakeRun) -> None:
    page = look(make_run([*[make_episode(n) for n in range(9)], failed_episode(9, "no door")]))
    low, high = wilson(3, 9)
    assert page["totals"]["success"] == {"value": pytest.approx(1 / 3), "low": low, "high": high, "of": 9}
    assert page["totals"]["episodes"] == 10
    assert page["totals"]["failed"] == 1
    assert page["outcomes"] == {"terminated": 9, "env_error": 1}
    assert page["failures"] == [
        {"outcome": "env_error", "message": "no door", "env": "rollgym/Made-v0", "count": 1, "episode": 9}
    ]


def test_episodes_of_one_task_are_one_cluster(make_run: MakeRun) -> None:
    alike = [make_episode(n, group=f"g{n // 4}", member=n % 4, success=n < 4) for n in range(8)]
    page = look(make_run(alike))
    success = page["totals"]["success"]
    assert success["value"] == 0.5
    # Two tasks, one always solved: resampling two clusters reaches both ends.
    assert (success["low"], success["high"]) == (0.0, 1.0)
    assert page["totals"]["tasks"] == 2


def test_environments_have_rows_of_their_own(make_run: MakeRun) -> None:
    page = look(make_run([make_episode(0), make_episode(1, env="B-v0"), make_episode(2, env="B-v0")]))
    assert [(one["env"], one["episodes"]) for one in page["envs"]] == [("rollgym/Made-v0", 1), ("B-v0", 2)]


def test_training_is_told_from_first_to_last(make_run: MakeRun) -> None:
    def line(step: int, phase: str, rate: float) -> dict[str, object]:
        around = {"success_rate": rate, "success_ci": [rate - 0.1, rate + 0.1], "mean_return": rate}
        return {"step": step, "phase": phase, "env": "A-v0", **around, "episodes": 20, "failed": 0}

    page = look(
        make_run(
            [],
            manifest={"kind": "train", "name": "mine", "envs": [{"id": "A-v0", "kwargs": {}}]},
            evaluations=[line(0, "before", 0.2), line(5, "training", 0.5), line(9, "after", 0.8)],
            metrics=[
                {
                    "step": s,
                    "success": 0.1 * s,
                    "clipped_low": 0.1,
                    "clipped_high": 0.2,
                    "seconds_train": 1.0,
                    "seconds_generate": 3.0,
                    "entropy": None,
                }
                for s in range(1, 10)
            ],
        )  # fmt: skip
    )
    (env,) = page["headline"]["trained"]
    assert (env["first"]["success"]["value"], env["last"]["success"]["value"]) == (0.2, 0.8)
    assert page["headline"]["steps"] == 9
    curves = {one["name"]: one["points"] for one in page["curves"]}
    assert set(curves) == {"success", "clip"}  # entropy was never a number
    assert curves["clip"][0] == [1, pytest.approx(0.3)]
    assert page["split"]["parts"]["generate"][0] == [1, 3.0]
    assert page["notes"] == ["The run stored no episodes."]


def test_an_empty_run_says_that_it_is_empty(make_run: MakeRun) -> None:
    page = look(make_run([]))
    assert page["totals"]["success"] is None
    assert page["notes"] == ["No episode has ended yet."]
    assert page["state"].startswith("no summary yet")


def test_long_curves_are_averaged() -> None:
    points = thin([(step, float(step)) for step in range(1, 1_001)], most=100)
    assert len(points) == 100
    assert points[0] == [10, 5.5]
    assert thin([(1, None), (2, 3.0)]) == [[2, 3.0]]


def test_strange_metrics_do_no_harm(make_run: MakeRun) -> None:
    strange = [{"step": "x", "return": "high"}, {"return": 1.0}, {"step": 1, "return": True}]
    assert look(make_run([], metrics=strange))["curves"] == []
    assert time_split([]) is None


def test_a_page_has_the_name_of_its_run_and_the_command_that_made_it(make_run: MakeRun) -> None:
    folder = make_run(
        [make_episode(0)], manifest={"kind": "train", "name": "frozen-lake", "command": "rollgym x"}
    )
    page = look(folder)
    assert page["name"] == folder.name
    assert page["command"] == "rollgym x"
    assert page["about"]["configuration"] == "frozen-lake"


def test_each_domain_has_a_chart() -> None:
    metrics = [
        {"step": 1, "success": 0.5, "success/math": 0.25, "success/code": 0.75},
        {"step": 2, "success": 0.6, "success/math": 0.5, "success/code": 0.75},
    ]
    charts = {chart["name"]: chart for chart in curves(metrics)}
    assert list(charts) == ["success", "success/code", "success/math"]
    assert charts["success/math"]["title"] == "Success in training: math"
    assert charts["success/math"]["points"] == [[1, 0.25], [2, 0.5]]
