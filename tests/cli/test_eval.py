"""``rollgym eval``: numbers that repeat, results that are never lost."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from rollgym.core.serialization import read_episodes
from rollgym.core.types import Outcome

Command = Callable[..., Any]
FIXTURES = Path(__file__).parents[1] / "fixtures"
SEARCHED = os.pathsep.join([str(FIXTURES), str(Path(__file__).parents[2])])
TIMED = ("seconds", "out", "agent_notes")


def untimed(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key not in TIMED}


def ids(folder: Path, name: str = "episodes.jsonl") -> list[str]:
    return [episode.spec.episode_id for episode in read_episodes(folder / name)]


def test_json_holds_what_a_script_needs(rollgym_command: Command) -> None:
    ran = rollgym_command(
        "eval", "faulty:Counting", "--agent", "random", "--episodes", 20, "--seed", 1, "--json"
    )
    assert ran.code == 0, ran.err
    summary = json.loads(ran.out)
    wanted = {"env", "agent", "split", "seed", "episodes", "success_rate", "success_ci", "mean_return"}
    assert wanted | {"outcomes", "versions", "task_set"} <= set(summary)
    assert summary["env"] == "faulty:Counting"
    assert summary["outcomes"] == {"terminated": 20}
    low, high = summary["success_ci"]
    assert 0 <= low < summary["success_rate"] < high <= 1


def test_the_same_seed_gives_the_same_numbers_whatever_the_workers(rollgym_command: Command) -> None:
    words = ("eval", "faulty:Counting", "--agent", "random", "--episodes", 30, "--seed", 7, "--json")
    first, again, spread, other = (
        untimed(json.loads(rollgym_command(*words, *more).out))
        for more in ((), (), ("--workers", 2, "--concurrency", 7), ("--seed", 8))
    )
    assert first == again == spread
    assert first["content_hash"] != other["content_hash"]


def test_every_episode_is_a_line_that_can_be_read_back(rollgym_command: Command, tmp_path: Path) -> None:
    rollgym_command("eval", "faulty:Counting", "--agent", "faulty:Yes", "--episodes", 5, "--out", "r")
    episodes = read_episodes(tmp_path / "r" / "episodes.jsonl")
    assert len(episodes) == 5
    assert {episode.spec.split for episode in episodes} == {"test"}
    assert all(episode.success and episode.total_reward == 3.0 for episode in episodes)
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert manifest["env"]["id"] == "faulty:Counting"
    assert manifest["versions"]["rollgym"]
    assert manifest["task_set"]["hash"]


def test_resume_plays_what_is_missing_and_nothing_twice(rollgym_command: Command, tmp_path: Path) -> None:
    words = ("eval", "faulty:Counting", "--episodes", 12, "--seed", 3, "--json")
    whole = json.loads(rollgym_command(*words).out)
    rollgym_command(*words, "--out", "r")
    file = tmp_path / "r" / "episodes.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    # Five whole lines and one that a crash cut off in the middle.
    file.write_bytes(b"".join(lines[:5]) + lines[5][:40])
    ran = rollgym_command(*words, "--out", "r", "--resume")
    assert ran.code == 0, ran.err
    assert len(ids(tmp_path / "r")) == len(set(ids(tmp_path / "r"))) == 12
    assert file.read_bytes().startswith(b"".join(lines[:5]))
    assert untimed(json.loads(ran.out)) == untimed(whole)


def test_resume_may_ask_for_more_episodes(rollgym_command: Command, tmp_path: Path) -> None:
    words = ("eval", "faulty:Counting", "--seed", 3, "--json", "--out", "r")
    rollgym_command(*words, "--episodes", 4)
    first = ids(tmp_path / "r")
    more = json.loads(rollgym_command(*words, "--episodes", 9, "--resume").out)
    assert more["episodes"] == 9
    assert ids(tmp_path / "r")[:4] == first


def test_pass_at_k_counts_episodes_that_share_a_task(rollgym_command: Command, tmp_path: Path) -> None:
    words = ("eval", "faulty:Counting", "--episodes", 40, "--per-task", 4, "--json", "--out", "r")
    summary = json.loads(rollgym_command(*words).out)
    assert list(summary["pass_at_k"]) == ["1", "2", "4"]
    assert summary["pass_at_k"]["1"] == pytest.approx(summary["success_rate"])
    assert summary["pass_at_k"]["1"] < summary["pass_at_k"]["4"]
    groups: dict[str, set[str]] = {}
    for episode in read_episodes(tmp_path / "r" / "episodes.jsonl"):
        groups.setdefault(episode.spec.group_id, set()).add(episode.turns[0].observation)
    assert len(groups) == 10
    assert all(len(starts) == 1 for starts in groups.values()), "siblings start from the same state"


def test_a_dead_worker_is_replaced_and_the_episode_played_again(
    rollgym_command: Command, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    words = ("--episodes", 4, "--workers", 1, "--concurrency", 1, "--out", "r", "--json")
    ran = rollgym_command("eval", "faulty:DiesOnce", "--env-arg", f"mark={mark}", *words)
    assert ran.code == 0, ran.err
    episodes = read_episodes(tmp_path / "r" / "episodes.jsonl")
    assert sorted(episode.attempts for episode in episodes) == [1, 1, 1, 2]


def test_excluded_episodes_are_counted_marked_and_said_loudly(rollgym_command: Command) -> None:
    words = ("eval", "faulty:RaisesOnSomeTasks", "--episodes", 12, "--agent", "faulty:Yes", "--out")
    ran = rollgym_command(*words, "r", "--json")
    summary = json.loads(ran.out)
    excluded = summary["excluded"]
    assert ran.code == 1
    assert 0 < excluded == summary["failed"] < 12
    assert (summary["success_rate"], summary["success_all"]) == (1.0, (12 - excluded) / 12)
    assert summary["many_excluded"] is True
    assert f"WARNING: {excluded} of 12 episodes ended by infrastructure errors" in ran.err
    shown = rollgym_command(*words, "s")
    assert f"success of all episodes {(12 - excluded) / 12:.3f}" in shown.out
    assert "WARNING" in shown.err


def test_failures_of_an_agent_are_counted_named_and_lower_its_score(
    rollgym_command: Command, tmp_path: Path
) -> None:
    words = ("--episodes", 12, "--workers", 2, "--agent", "faulty:Yes", "--out", "r", "--json")
    ran = rollgym_command("eval", "faulty:DiesOnSomeTasks", *words)
    summary = json.loads(ran.out)
    episodes = read_episodes(tmp_path / "r" / "episodes.jsonl")
    lost = [episode for episode in episodes if episode.outcome is Outcome.WORKER_LOST]
    assert ran.code == 1
    assert "episodes failed: a worker process died" in ran.err
    assert summary["failed"] == len(lost) >= 1
    # An action brought the worker down each time, so these count as failures of the agent.
    assert (summary["scored"], summary["excluded"], summary["many_excluded"]) == (12, 0, False)
    assert summary["success_rate"] == (12 - len(lost)) / 12
    assert all(episode.error is not None and episode.error.by_agent for episode in lost)
    # The guilty ones, and none of those that shared a worker with them.
    guilty = {e.spec.episode_id for e in episodes if e.spec.task is not None and e.spec.task % 3 == 0}
    assert {episode.spec.episode_id for episode in lost} == guilty


def test_an_environment_that_always_fails_stops_the_run_with_one_sentence(
    rollgym_command: Command, tmp_path: Path
) -> None:
    ran = rollgym_command("eval", "faulty:RaisesInReset", "--episodes", 1000, "--out", "r")
    assert ran.code == 1
    assert "raised in reset(): RuntimeError: the shop is closed" in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert len(ids(tmp_path / "r")) == 10


def test_finished_episodes_survive_failures_in_the_rest(rollgym_command: Command, tmp_path: Path) -> None:
    ran = rollgym_command("eval", "faulty:RaisesOnSomeTasks", "--episodes", 30, "--out", "r", "--json")
    summary = json.loads(ran.out)
    assert ran.code == 1
    assert len(ids(tmp_path / "r")) == 30
    assert 0 < summary["scored"] < 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_is_done_and_resume_finishes(
    rollgym_command: Command, tmp_path: Path, number: signal.Signals
) -> None:
    words = ["eval", "faulty:Sleeps", "--episodes", "60", "--workers", "2", "--out", "r", "--json"]
    environment = {**os.environ, "PYTHONPATH": SEARCHED}
    process = subprocess.Popen(
        [sys.executable, "-m", "rollgym", *words],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    file = tmp_path / "r" / "episodes.jsonl"
    deadline = time.monotonic() + 60
    while (not file.exists() or file.read_bytes().count(b"\n") < 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "--resume plays the rest" in err
    assert "Traceback" not in err
    kept = ids(tmp_path / "r")
    assert 3 <= len(kept) < 60
    assert json.loads(out)["episodes"] == len(kept)
    ran = rollgym_command(*words, "--resume")
    assert ran.code == 0, ran.err
    assert ids(tmp_path / "r")[: len(kept)] == kept
    assert len(set(ids(tmp_path / "r"))) == len(ids(tmp_path / "r")) == 60


def test_plain_gymnasium_environments_can_be_evaluated(rollgym_command: Command) -> None:
    ran = rollgym_command("eval", "CartPole-v1", "--episodes", 3, "--json")
    summary = json.loads(ran.out)
    assert (ran.code, summary["outcomes"], summary["split"]) == (0, {"terminated": 3}, "")
    assert summary["success_rate"] == 0.0


@pytest.mark.filterwarnings("default:Taxi-v3 is retired")
def test_a_retired_version_of_a_gymnasium_id_plays_its_successor_and_says_so(
    rollgym_command: Command,
) -> None:
    ran = rollgym_command("eval", "Taxi-v3", "--episodes", 2, "--json")
    summary = json.loads(ran.out)
    assert (ran.code, summary["scored"]) == (0, 2)
    successor = "" if "Taxi-v3" in gymnasium.registry else "using Taxi-v4"
    assert successor in ran.err


def test_an_evaluation_ends_even_where_the_environment_never_does(rollgym_command: Command) -> None:
    summary = json.loads(rollgym_command("eval", "faulty:NeverEnds", "--episodes", 2, "--json").out)
    assert summary["outcomes"] == {"turn_limit": 2}
    assert summary["length"]["max"] == 2000


def test_tables_for_people(rollgym_command: Command) -> None:
    ran = rollgym_command("eval", "faulty:Counting", "--agent", "faulty:says_no", "--episodes", 5)
    assert ran.code == 0
    assert "success" in ran.out
    assert "0.000" in ran.out
    assert "runs/" in ran.out


def test_resume_plays_failed_episodes_again_unless_they_are_kept(
    rollgym_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("eval", "faulty:RaisesOnce", "--episodes", 6, "--seed", 3, "--out", "r", "--json")
    monkeypatch.setenv("RAISES", "1")
    first = rollgym_command(*words)
    assert first.code == 1
    failed = json.loads(first.out)["failed"]
    assert failed == 6
    monkeypatch.delenv("RAISES")
    kept = rollgym_command(*words, "--resume", "--keep-failed")
    assert json.loads(kept.out)["failed"] == failed
    again = rollgym_command(*words, "--resume")
    assert again.code == 0, again.err
    assert json.loads(again.out)["failed"] == 0
    assert len(ids(tmp_path / "r")) == 6
    assert len(ids(tmp_path / "r", "failed.jsonl")) == failed


def test_addresses_timeouts_and_retries_may_change_on_resume_and_a_refusal_names_one_key(
    rollgym_command: Command, tmp_path: Path
) -> None:
    words = ("eval", "faulty:Counting", "--episodes", 2, "--out", "r", "--agent", "faulty:Optioned")
    first = rollgym_command(*words, "--agent-arg", "timeout=3", "--agent-arg", "style=short")
    assert first.code == 0, first.err
    changed = ("--agent-arg", "timeout=9", "--max-seconds", 60, "--concurrency", 3, "--workers", 1)
    ran = rollgym_command(*words, *changed, "--agent-arg", "style=short", "--resume")
    assert ran.code == 0, ran.err
    ran = rollgym_command(*words, "--agent-arg", "style=long", "--resume")
    assert ran.code == 2
    assert 'agent.options.style = "short", but now it is "long"' in ran.err
    assert "timeout" not in ran.err


def test_actions_that_are_never_valid_are_said_at_once_and_marked(
    rollgym_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parser that does not fit looks like an agent without skill: success 0.000."""
    from rollgym.view.overview import overview
    from rollgym.view.reader import RunView

    (tmp_path / "mumbles.py").write_text("def play(observation, info):\n    return 'xyzzy'\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ("eval", "rollgym/FrozenLake-v0", "--agent", "mumbles:play", "--out", tmp_path / "r")
    ran = rollgym_command(*words, "--episodes", 10)
    sentence = "Only 0.0% of the actions were valid"
    assert " ".join(ran.err.split()).count(sentence) == 1
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert [one["name"] for one in summary["warnings"]] == ["few_valid_actions"]
    page = overview(RunView(tmp_path / "r"))
    assert page["suspect"]
    assert any(sentence in note for note in page["notes"])


def test_an_agent_that_plays_soundly_is_not_suspected(rollgym_command: Command, tmp_path: Path) -> None:
    from rollgym.view.overview import overview
    from rollgym.view.reader import RunView

    ran = rollgym_command(
        "eval", "rollgym/FrozenLake-v0", "--agent", "random", "--episodes", 10, "--out", tmp_path / "r"
    )
    assert "warning" not in ran.err.lower()
    assert not overview(RunView(tmp_path / "r"))["suspect"]


def test_a_failure_that_the_agent_caused_gets_no_second_attempt(rollgym_command: Command) -> None:
    """Otherwise an agent could crash hard tasks and resume until they go well."""
    words = ("eval", "faulty:RaisesInStep", "--agent", "random", "--episodes", 4, "--out", "r", "--json")
    first = json.loads(rollgym_command(*words).out)
    assert (first["failed"], first["excluded"], first["success_rate"]) == (4, 0, 0.0)
    before = Path("r/episodes.jsonl").read_bytes()
    again = json.loads(rollgym_command(*words, "--resume").out)
    assert again["success_rate"] == 0.0
    assert Path("r/episodes.jsonl").read_bytes() == before
