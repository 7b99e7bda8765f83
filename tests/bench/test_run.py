"""Playing suites: the same numbers every time, nothing lost, nothing played twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgym.bench.summary import mean_interval
from rollgym.core.serialization import read_episodes

from .conftest import SUITE, write_suite

Command = Callable[..., Any]
TIMED = ("seconds", "wall_seconds", "files", "out")


def untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: untimed(item) for key, item in value.items() if key not in TIMED}
    return [untimed(item) for item in value] if isinstance(value, list) else value


def ids(out: Path, entry: str) -> list[str]:
    return [e.spec.episode_id for e in read_episodes(out / "entries" / entry / "episodes.jsonl")]


def test_a_missed_golden_score_is_reported_with_exit_code_1(rollgym_command: Command, tmp_path: Path) -> None:
    golden = "tasks = 6\ngolden.random = { success = 1.0, score = 3.0 }"
    write_suite(tmp_path, SUITE.replace("tasks = 6", golden))
    ran = rollgym_command("bench", "run", "little.toml", "--out", "r", "--json")
    assert ran.code == 1
    assert json.loads(ran.out)["golden"] == {"checked": 1, "missed": ["alone"]}
    assert "Golden score missed in: alone." in ran.err
    assert "golden score of random was missed" in (tmp_path / "r" / "report.md").read_text()


def test_a_tolerance_is_granted(rollgym_command: Command, tmp_path: Path) -> None:
    golden = "golden.random = { success = 0.5, score = 1.5, tolerance = 0.5, score_tolerance = 1.5 }"
    write_suite(tmp_path, SUITE.replace("tasks = 6", f"tasks = 6\n{golden}"))
    assert rollgym_command("bench", "run", "little.toml", "--out", "r").code == 0


def test_other_tasks_than_the_pinned_ones_are_noticed(rollgym_command: Command, tmp_path: Path) -> None:
    write_suite(tmp_path, SUITE.replace("tasks = 6", 'tasks = 6\ncontent = "0123456789abcdef"'))
    ran = rollgym_command("bench", "run", "little.toml", "--out", "r", "--json")
    assert ran.code == 1
    assert json.loads(ran.out)["other_tasks"] == ["alone"]
    assert "Tasks differ from those of the suite in: alone." in ran.err


def test_the_numbers_are_the_same_whatever_the_workers(rollgym_command: Command, suite_path: Path) -> None:
    first, spread = (
        untimed(json.loads(rollgym_command("bench", "run", suite_path, "--json", *more).out))
        for more in ((), ("--workers", 2, "--concurrency", 5))
    )
    assert first == spread
    assert [row["requested"] for row in first["entries"]] == [6, 6]


def test_a_folder_holds_everything_needed_to_check_it(played: Path) -> None:
    manifest = json.loads((played / "manifest.json").read_text())
    summary = json.loads((played / "summary.json").read_text())
    assert manifest["suite"]["entries"][1]["samples"] == 2
    assert manifest["agent"] == {"name": "random", "options": {}}
    assert {"python", "rollgym", "numpy"} <= set(manifest["versions"])
    assert set(summary["files"]) == {"entries/alone/episodes.jsonl", "entries/twice/episodes.jsonl"}
    row = summary["entries"][0]
    assert {"success", "success_ci", "score", "turns", "tokens", "seconds", "golden"} <= set(row)
    assert row["turns"] == 3
    assert list(summary["entries"][1]["pass_at_k"]) == ["1", "2"]
    report = (played / "report.md").read_text()
    assert report.startswith("# little 3: random\n")
    assert "| alone | faulty:Counting |" in report


def test_the_suites_interval_holds_the_mean_and_sees_that_few_successes_prove_little() -> None:
    certain = {"success": 1.0, "success_ci": [0.8, 1.0]}
    # Two entries: the half of the interval of their mean is sqrt(0.2² + 0.2²) / 2.
    assert mean_interval([certain, certain]) == pytest.approx((1 - 0.08**0.5 / 2, 1.0))
    assert mean_interval([certain]) == pytest.approx((0.8, 1.0))


def test_resume_plays_what_is_missing_and_nothing_twice(
    rollgym_command: Command, suite_path: Path, tmp_path: Path
) -> None:
    words = ("bench", "run", suite_path, "--json", "--out", "r")
    whole = json.loads(rollgym_command(*words).out)
    file = tmp_path / "r/entries/alone/episodes.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    # Two whole lines and half of one, as a kill leaves them; the second entry was never begun.
    file.write_bytes(b"".join(lines[:2]) + lines[2][:50])
    for path in sorted((tmp_path / "r/entries/twice").iterdir()):
        path.unlink()
    (tmp_path / "r/summary.json").unlink()
    ran = rollgym_command(*words, "--resume")
    assert ran.code == 0, ran.err
    assert file.read_bytes().startswith(b"".join(lines[:2]))
    assert len(ids(tmp_path / "r", "alone")) == len(set(ids(tmp_path / "r", "alone"))) == 6
    assert untimed(json.loads(ran.out)) == untimed(whole)
    assert rollgym_command("bench", "verify", "r", "--sample", 0).code == 0


def test_resume_of_a_finished_run_plays_nothing(
    rollgym_command: Command, suite_path: Path, tmp_path: Path
) -> None:
    words = ("bench", "run", suite_path, "--json", "--out", "r")
    first = json.loads(rollgym_command(*words).out)
    again = json.loads(rollgym_command(*words, "--resume").out)
    assert again == first


def test_resume_reruns_failed_episodes_and_keeps_their_lines(
    rollgym_command: Command, tmp_path: Path
) -> None:
    text = SUITE.replace('env = "faulty:Counting"\ntasks', 'env = "faulty:RaisesOnSomeTasks"\ntasks')
    write_suite(tmp_path, text)
    words = ("bench", "run", "little.toml", "--json", "--out", "r")
    ran = rollgym_command(*words)
    failed = json.loads(ran.out)["failed"]
    assert ran.code == 1
    assert 0 < failed < 6
    assert f"{failed} of 12 episodes failed" in ran.err
    assert json.loads(rollgym_command(*words, "--resume").out)["failed"] == failed
    assert len(read_episodes(tmp_path / "r/entries/alone/failed.jsonl")) == failed
    assert len(set(ids(tmp_path / "r", "alone"))) == len(ids(tmp_path / "r", "alone")) == 6


def test_a_broken_environment_does_not_take_the_other_entries_with_it(
    rollgym_command: Command, tmp_path: Path
) -> None:
    text = SUITE.replace('env = "faulty:Counting"\ntasks = 6', 'env = "faulty:RaisesInReset"\ntasks = 40')
    write_suite(tmp_path, text)
    ran = rollgym_command("bench", "run", "little.toml", "--json", "--out", "r")
    summary = json.loads(ran.out)
    assert ran.code == 1
    assert "alone: All of the first 10 episodes failed" in ran.err
    assert "the shop is closed" in ran.err
    assert [row["episodes"] for row in summary["entries"]] == [10, 6]
    assert summary["entries"][1]["complete"]


def test_only_some_entries_can_be_played(rollgym_command: Command, suite_path: Path) -> None:
    ran = rollgym_command("bench", "run", suite_path, "--only", "twice", "--json", "--out", "r")
    summary = json.loads(ran.out)
    assert ([row["name"] for row in summary["entries"]], summary["left_out"]) == (["twice"], ["alone"])
    assert summary["complete"]
    assert (
        "no entry of suite little called 'twise'"
        in rollgym_command("bench", "run", suite_path, "--only", "twise").err
    )


def test_user_data_fills_in_an_entry(rollgym_command: Command, tmp_path: Path) -> None:
    task = {
        "task_id": "HumanEval/0",
        "prompt": "def one():\n    '''One.'''\n",
        "entry_point": "one",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "canonical_solution": "    return 1\n",
    }
    (tmp_path / "he.jsonl").write_text(json.dumps(task) + "\n")
    words = ("bench", "run", "code", "--only", "humaneval", "--json", "--out", "r")
    assert "--data humaneval=... (problems)" in rollgym_command(*words).err
    ran = rollgym_command(*words, "--data", "humaneval=he.jsonl")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["entries"][0]["requested"] == 1
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "he.jsonl").rename(tmp_path / "elsewhere/he.jsonl")
    gone = rollgym_command("bench", "verify", "r")
    assert (gone.code, "Data file not found: he.jsonl" in gone.out) == (1, True)
    moved = rollgym_command("bench", "verify", "r", "--data", "humaneval=elsewhere/he.jsonl")
    assert moved.code == 0, moved.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--agent", "unknown"), "no agent called 'unknown'"),
        (("--agent", "expert"), "has no expert"),
        (("--resume",), "--resume needs --out"),
        (("--data", "alone"), "--data 'alone': expected entry=value"),
        (("--data", "alone=x"), "does not take --data"),
        (("--agent", "chat"), "No model given: pass model=NAME"),
        (("--workers", "-1"), "--workers must be at least 0"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    rollgym_command: Command, suite_path: Path, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    ran = rollgym_command("bench", "run", suite_path, *words)
    assert ran.code == 2
    assert sentence in ran.err
    assert not (tmp_path / "runs").exists()


def test_results_are_never_overwritten_nor_mixed(rollgym_command: Command, suite_path: Path) -> None:
    rollgym_command("bench", "run", suite_path, "--out", "r")
    ran = rollgym_command("bench", "run", suite_path, "--out", "r")
    assert (ran.code, "already holds results" in ran.err) == (2, True)
    ran = rollgym_command("bench", "run", suite_path, "--out", "r", "--agent", "faulty:Yes", "--resume")
    assert (ran.code, "was created with agent" in ran.err) == (2, True)
    suite_path.write_text(SUITE.replace("tasks = 6", "tasks = 5"))
    ran = rollgym_command("bench", "run", suite_path, "--out", "r", "--resume")
    assert (ran.code, "was created with suite_hash" in ran.err) == (2, True)


def test_a_broken_line_is_named_and_left_alone(
    rollgym_command: Command, suite_path: Path, tmp_path: Path
) -> None:
    rollgym_command("bench", "run", suite_path, "--out", "r")
    file = tmp_path / "r/entries/alone/episodes.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    broken = b"".join([lines[0], b"garbage\n", *lines[2:]])
    file.write_bytes(broken)
    ran = rollgym_command("bench", "run", suite_path, "--out", "r", "--resume")
    assert ran.code == 1
    assert "episodes.jsonl, line 2: not valid JSON" in ran.err
    assert file.read_bytes() == broken
