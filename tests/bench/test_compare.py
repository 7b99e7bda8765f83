"""Two results of a suite, task by task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgym.bench.results import compare_results
from rollgym.core.errors import UsageError

from .conftest import SUITE, play

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def yes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return play(tmp_path_factory.mktemp("yes"), "faulty:Yes")


def test_both_play_the_same_tasks_and_the_difference_has_a_p_value(yes: Path, played: Path) -> None:
    found = compare_results(yes, played)
    rates = [json.loads((path / "summary.json").read_text())["success"] for path in (yes, played)]
    overall = found["success"]
    assert overall["tasks"] == 6 + 3
    assert overall["mean_a"] == pytest.approx(rates[0]) == 1.0
    assert overall["mean_b"] == pytest.approx(rates[1]), "entries weigh the same as in the suite's success"
    assert 0 < overall["p_value"] < 1
    assert found["entries"]["twice"]["success"]["tasks"] == 3
    assert found["notes"] == []


def test_one_result_is_as_good_as_itself(played: Path) -> None:
    overall = compare_results(played, played)["success"]
    assert (overall["difference"], overall["p_value"]) == (0.0, 1.0)


def test_different_suites_cannot_be_compared(played: Path, tmp_path: Path) -> None:
    other = play(tmp_path, "random", SUITE.replace("tasks = 6", "tasks = 5"))
    with pytest.raises(UsageError, match="cannot be compared"):
        compare_results(played, other)


def test_what_only_one_side_played_is_mentioned(played: Path, tmp_path: Path) -> None:
    part = play(tmp_path, "random", only=["twice"])
    found = compare_results(played, part)
    assert (list(found["entries"]), found["notes"]) == (["twice"], ["played by one side only: alone"])
    with pytest.raises(UsageError, match="no entry in common"):
        compare_results(part, play(tmp_path, "faulty:Yes", only=["alone"]))


def test_tables_and_json(rollgym_command: Command, yes: Path, played: Path) -> None:
    ran = rollgym_command("bench", "compare", yes, played)
    assert ran.code == 0
    assert "p-value" in ran.out
    assert json.loads(rollgym_command("bench", "compare", yes, played, "--json").out)["suite"] == {
        "name": "little",
        "version": 3,
    }
    assert (
        "does not hold the results of a suite"
        in rollgym_command("bench", "compare", yes, played / "entries/alone").err
    )


def test_show_and_list(rollgym_command: Command, played: Path) -> None:
    assert "| alone" not in (shown := rollgym_command("bench", "show", played)).out
    assert "alone" in shown.out
    assert json.loads(rollgym_command("bench", "show", played, "--json").out)["kind"] == "bench"
    assert json.loads(rollgym_command("bench", "show", "smoke", "--json").out)["hash"]
    assert "golden" in rollgym_command("bench", "show", "webshop").out
    listed = json.loads(rollgym_command("bench", "list", "--json").out)
    assert [suite["name"] for suite in listed] == ["code", "core", "smoke", "sokoban", "webshop"]
    assert "smoke" in rollgym_command("bench", "list").out


def test_limits_that_ended_episodes_are_mentioned(played: Path) -> None:
    from rollgym.bench.summary import remarks

    summary = json.loads((played / "summary.json").read_text())
    assert remarks(summary) == []
    summary["entries"][0]["outcomes"] = {"terminated": 2, "token_limit": 4}
    assert remarks(summary) == ["alone: 4 of 6 episodes ended at the limit of tokens, or a full context."]
