"""Verifying: an honest result holds, a spoilt one does not, and it is said what differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollgym.bench.verify import Verdict
from rollgym.bench.verify import verify as verify_results
from rollgym.core.errors import ResultsError, UsageError

from .conftest import SUITE, play, write_suite

Command = Callable[..., Any]
Spoil = Callable[..., None]


verify = partial(verify_results, modules=("faulty",))
"""With the module that has the environments of the suite here."""


def said(verdict: Verdict) -> str:
    assert not verdict.holds
    return "\n".join(f"{problem.where}: {problem.what}" for problem in verdict.problems)


def test_an_honest_result_holds(played: Path) -> None:
    verdict = verify(played, sample=0)
    assert (verdict.problems, verdict.episodes, verdict.replayed) == ([], 12, 12)
    assert "rollgym has no suite 'little'" in verdict.notes[0]


def test_a_result_can_be_moved(results: Path) -> None:
    assert verify(results, sample=4).holds


def test_the_sample_is_chosen_by_the_seed_and_spread_over_the_entries(played: Path) -> None:
    def sample(seed: int) -> list[str]:
        seen: list[str] = []
        verify(played, sample=5, seed=seed, on_episode=lambda done: seen.append(done.episode_id))
        return seen

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert len(sample(1)) == 5
    assert {episode_id.split("-")[0] for episode_id in sample(1)} == {"test", "dev"}


def changes() -> list[tuple[str, Callable[[dict[str, Any]], Any], str]]:
    def success(e: dict[str, Any]) -> None:
        e["success"] = not e["success"]

    def reward(e: dict[str, Any]) -> None:
        e["turns"][0]["reward"] += 1.0

    def action(e: dict[str, Any]) -> None:
        e["turns"][0]["action"] = "no" if e["turns"][0]["action"] == "yes" else "yes"

    def seed(e: dict[str, Any]) -> None:
        e["spec"]["env_seed"] += 1

    def task(e: dict[str, Any]) -> None:
        e["spec"]["task"] += 1

    def seconds(e: dict[str, Any]) -> None:
        e["seconds"] = 0.0

    return [
        ("success", success, "is recorded, but the last turn has"),
        ("reward", reward, "but the rewards sum to"),
        ("action", action, "the file has changed since"),
        ("seed", seed, "env_seed"),
        ("task", task, "task"),
        ("time", seconds, "seconds"),
    ]


@pytest.mark.parametrize(("what", "work", "sentence"), changes(), ids=lambda value: str(value)[:8])
def test_a_changed_episode_is_noticed_without_playing_it(
    results: Path, spoil: Spoil, what: str, work: Callable[[dict[str, Any]], Any], sentence: str
) -> None:
    spoil(work)
    found = said(verify(results, sample=1, seed=1))
    assert sentence in found
    assert "entries/alone/episodes.jsonl: the file has changed since" in found


@pytest.mark.parametrize(("what", "work", "sentence"), changes()[:3], ids=lambda value: str(value)[:8])
def test_a_careful_forgery_is_found_by_replaying_it(
    results: Path,
    spoil: Spoil,
    forge: Callable[[], None],
    what: str,
    work: Callable[[dict[str, Any]], Any],
    sentence: str,
) -> None:
    def consistent(episode: dict[str, Any]) -> None:
        work(episode)
        episode["return"] = sum(turn["reward"] for turn in episode["turns"])
        episode["turns"][-1]["info"]["success"] = episode["success"]

    spoil(consistent, number=3)
    forge()
    found = said(verify(results, sample=0))
    assert "replayed, in turn" in found
    assert "the file has changed" not in found, "the forger was careful"


def test_a_removed_episode_is_missed_even_where_everything_else_fits(
    results: Path, forge: Callable[[], None]
) -> None:
    path = results / "entries/twice/episodes.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    gone = json.loads(lines[2])["spec"]["episode_id"]
    path.write_text("".join(lines[:2] + lines[3:]))
    forge()
    assert f"twice: missing episodes: 1 ({gone})" in said(verify(results, sample=1))


def test_an_episode_that_counts_twice_is_noticed(results: Path, forge: Callable[[], None]) -> None:
    path = results / "entries/alone/episodes.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[0]]))
    forge()
    assert "it is recorded twice" in said(verify(results, sample=1))


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        (("success",), "summary: success: 0.99 is recorded"),
        (("success_ci", 0), "summary: success_ci[0]: 0.99 is recorded"),
        (("entries", 1, "score"), "summary: entries[1].score: 0.99 is recorded"),
        (("entries", 0, "turns"), "summary: entries[0].turns: 0.99 is recorded"),
        (("wall_seconds",), "summary: wall_seconds: 0.99 is recorded"),
    ],
)
def test_a_changed_number_is_named(results: Path, place: tuple[Any, ...], sentence: str) -> None:
    path = results / "summary.json"
    summary = value = json.loads(path.read_text())
    for step in place[:-1]:
        value = value[step]
    value[place[-1]] = 0.99
    path.write_text(json.dumps(summary))
    assert sentence in said(verify(results, sample=1))


def test_a_changed_entry_summary_and_report_are_named(results: Path) -> None:
    path = results / "entries/alone/summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "success_rate": 1.0}))
    report = results / "report.md"
    report.write_text(report.read_text().replace("Success 0", "Success 1"))
    found = said(verify(results, sample=1))
    assert "alone, summary: success_rate: 1.0 is recorded" in found
    assert "report.md: it does not match the summary" in found


def test_a_suite_made_easier_is_noticed(results: Path, forge: Callable[[], None]) -> None:
    path = results / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["suite"]["entries"][0]["tasks"] = 1
    path.write_text(json.dumps(manifest))
    assert "suite: its hash is" in said(verify(results, sample=1))


def test_results_of_a_shipped_suite_must_be_of_the_version_that_ships(tmp_path: Path) -> None:
    named = SUITE.replace('"little"', '"smoke"')
    older = play(tmp_path, "faulty:says_no", named)
    assert "the results belong to smoke 3, but rollgym has smoke 1" in said(verify(older, sample=1))
    other = play(tmp_path, "random", named.replace("version = 3", "version = 1"))
    assert "it differs from smoke 1 of this rollgym" in said(verify(other, sample=1))


def test_a_custom_suite_is_checked_against_its_file(
    rollgym_command: Command, results: Path, tmp_path: Path
) -> None:
    write_suite(tmp_path)
    assert rollgym_command("bench", "verify", results, "--suite", "little.toml").code == 0
    write_suite(tmp_path, SUITE.replace("max_turns = 10", "max_turns = 11"))
    ran = rollgym_command("bench", "verify", results, "--suite", "little.toml")
    assert (ran.code, "it differs from little 3" in ran.out) == (1, True)


def test_the_command_reports_differences_and_exits_with_1(
    rollgym_command: Command, results: Path, spoil: Spoil
) -> None:
    whole = rollgym_command("bench", "verify", results, "--json")
    assert (whole.code, json.loads(whole.out)["holds"]) == (0, True)
    spoil(changes()[0][1])
    ran = rollgym_command("bench", "verify", results)
    assert ran.code == 1
    assert "little 3 by random: not verified" in ran.out
    ran = rollgym_command("bench", "verify", results, "--json")
    assert (ran.code, json.loads(ran.out)["holds"]) == (1, False)


def test_half_written_and_corrupt_results_are_distinguished(results: Path) -> None:
    path = results / "entries/alone/episodes.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert "episodes.jsonl, line 6: not valid JSON" in said(verify(results, sample=1))
    shutil.rmtree(results / "entries/alone")
    assert f"alone: Run folder {results / 'entries/alone'} does not exist" in said(verify(results, sample=1))
    (results / "summary.json").write_text("{")
    with pytest.raises(ResultsError, match=r"summary.json is not valid JSON"):
        verify(results)
    (results / "summary.json").unlink()
    with pytest.raises(ResultsError, match=r"Run the same command with --resume"):
        verify(results)
    (results / "manifest.json").write_text('{"schema": 1, "kind": "bench", "suite": {}}')
    with pytest.raises(ResultsError, match=r"manifest.json is broken"):
        verify(results)
    whole = {"suite_hash": "", "agent": {"name": "a", "options": {}}, "data": {}, "versions": {}}
    outside = {"schema": 1, "kind": "bench", "suite": {}, "entries": ["../up"], **whole}
    (results / "manifest.json").write_text(json.dumps(outside))
    with pytest.raises(ResultsError, match=r"entries\[0\]"):
        verify(results)
    (results / "manifest.json").write_text('{"schema": 3, "kind": "bench"}')
    with pytest.raises(ResultsError, match=r"schema 3, but this rollgym reads up to 2"):
        verify(results)
    (results / "manifest.json").unlink()
    with pytest.raises(UsageError, match=r"is not a run folder"):
        verify(results)
    with pytest.raises(UsageError, match=r"Run folder .* does not exist"):
        verify(results / "nowhere")


def test_episodes_that_failed_are_mentioned_but_hold(tmp_path: Path) -> None:
    text = SUITE.replace('env = "faulty:Counting"\ntasks', 'env = "faulty:RaisesOnSomeTasks"\ntasks')
    verdict = verify(play(tmp_path, "random", text), sample=0)
    assert verdict.holds, verdict.problems
    assert "episodes ended by an error; " in " ".join(verdict.notes)


def test_a_lost_game_cannot_be_passed_off_as_a_failure(
    results: Path, spoil: Spoil, forge: Callable[[], None]
) -> None:
    def excuse(episode: dict[str, Any]) -> None:
        episode["outcome"], episode["success"] = "engine_error", None

    spoil(excuse)
    forge()
    assert "engine_error is recorded, but the last turn ended" in said(verify(results, sample=1))
