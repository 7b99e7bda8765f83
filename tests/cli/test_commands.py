"""The other commands: envs, agents, compare, check, play, new, help."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
COMMANDS = [
    "envs",
    "agents",
    "play",
    "eval",
    "compare",
    "check",
    "new",
    "trace",
    "train",
    "imitate",
    "model new",
    "config list",
    "config show",
    "config explain",
    "config schema",
]


def test_envs_lists_every_environment_with_what_a_user_asks(rollgym_command: Command) -> None:
    rows = json.loads(rollgym_command("envs", "--json").out)
    rows = [row for row in rows if row["id"].startswith("rollgym/")]
    by_id = {row["id"]: row for row in rows}
    names = (
        "Sokoban FrozenLake Bandit Countdown GuessTheNumber Wordle Mastermind Minesweeper TowerOfHanoi Sudoku"
    )
    assert {f"rollgym/{name}-v0" for name in [*names.split(), "TwentyFortyEight"]} <= set(by_id)
    for row in rows:
        assert row["what"], row
        assert "test" in row["splits"], row
        assert row["reward_range"][0] < row["reward_range"][1], row
        assert "WebShop" in row["id"] or row["needs"] == "", row
    assert by_id["rollgym/WebShop-v0"]["needs"] == "webshop"
    assert by_id["rollgym/WebShopBrowser-v0"]["needs"] == "webshop, browser"
    table = rollgym_command("envs")
    assert table.code == 0
    assert "rollgym/Sokoban-v0" in table.out


def test_agents_are_listed(rollgym_command: Command) -> None:
    rows = json.loads(rollgym_command("agents", "--json").out)
    assert {"random", "expert", "human", "scripted", "chat"} <= {row["name"] for row in rows}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(rollgym_command: Command, command: str) -> None:
    ran = rollgym_command(*command.split(), "--help")
    assert ran.code == 0
    assert "Example: rollgym" in ran.out


def test_trace_says_where_the_time_of_an_evaluation_went(rollgym_command: Command, tmp_path: Path) -> None:
    rollgym_command("eval", "faulty:Sleeps", "--episodes", 6, "--workers", 2, "--out", "r")
    result = json.loads(rollgym_command("trace", "r", "--json").out)
    assert result["episodes"] == 6
    assert result["longest_waits"][0]["state"] in ("stepping", "opening", "resetting")
    assert result["time_by_state"]["stepping"] > result["time_by_state"]["generating"]
    assert json.loads((tmp_path / "r" / "trace.json").read_text())["traceEvents"]
    assert "longest waits" in rollgym_command("trace", "r").out


def test_compare_is_paired_and_symmetric(rollgym_command: Command) -> None:
    for agent, name in (("faulty:Yes", "yes"), ("random", "random")):
        rollgym_command("eval", "faulty:Counting", "--agent", agent, "--episodes", 30, "--out", name)
    ab = json.loads(rollgym_command("compare", "yes", "random", "--json").out)
    ba = json.loads(rollgym_command("compare", "random", "yes", "--json").out)
    assert ab["tasks"] == 30
    assert ab["success"]["difference"] == -ba["success"]["difference"] > 0
    assert ab["success"]["low"] > 0
    assert ab["success"]["p_value"] < 0.01
    assert ab["success"]["b_better"] == 0
    assert "p-value" in rollgym_command("compare", "yes", "random").out


def test_compare_refuses_different_environments_and_disjoint_tasks(rollgym_command: Command) -> None:
    rollgym_command("eval", "faulty:Counting", "--episodes", 2, "--out", "a")
    rollgym_command("eval", "faulty:Sleeps", "--episodes", 2, "--out", "b")
    rollgym_command("eval", "faulty:Counting", "--episodes", 2, "--out", "c", "--split", "dev")
    assert "different environments" in rollgym_command("compare", "a", "b").err
    assert "no task in common" in rollgym_command("compare", "a", "c").err


def test_check_prints_a_table_and_says_it_by_exit_code(rollgym_command: Command) -> None:
    good = rollgym_command("check", "rollgym/GuessTheNumber-v0", "--quick")
    assert good.code == 0, good.out
    assert "rollgym/GuessTheNumber-v0 passes (" in good.out
    bad = rollgym_command("check", "faulty:NotANumber", "--quick")
    assert bad.code == 1
    assert "✗ failed" in bad.out
    assert "range" in bad.out


def test_play_is_a_game(rollgym_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "/help\n/rules\n/hint\n50\nnonsense\n/new\n1\n/quit\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(words))
    ran = rollgym_command("play", "rollgym/GuessTheNumber-v0", "--task", 3, "--split", "test", "--seed", 1)
    assert ran.code == 0, ran.err
    assert "return" in ran.out


def test_play_against_an_agent_in_another_role(
    rollgym_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("play", "rollgym/Nim-v0", "--role", "player_1=expert", "--env-arg", "faults=1", "--seed", 1)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/hint\nnonsense\nn\n"))
    ran = rollgym_command(*words, "--task", 3, "--split", "test")
    assert ran.code == 0, ran.err
    assert "player_1: " in ran.out
    assert "Not this time. Return -1 in 2 turns." in ran.out  # the person's own reward


def test_play_ends_quietly_where_the_input_does(
    rollgym_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\nyes\n"))
    ran = rollgym_command("play", "faulty:Counting")
    assert ran.code == 0
    assert ran.out.rstrip().endswith("Bye.")


def test_play_takes_tool_calls_as_words(rollgym_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = 'turn right 3\n{"name": "turn", "arguments": {"direction": "left"}}\npull\nn\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(words))
    ran = rollgym_command("play", "tool_envs:Safe", "--seed", 1)
    assert ran.code == 0, ran.err
    assert "turn(direction, steps): Turn the dial." in ran.out
    assert "The dial shows 3." in ran.out
    assert "The dial shows 2." in ran.out


def test_play_shows_a_win(rollgym_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\nyes\nyes\nn\n"))
    assert "You did it! Return 3 in 3 turns." in rollgym_command("play", "faulty:Counting").out


def test_a_new_package_works_as_written(rollgym_command: Command, tmp_path: Path) -> None:
    assert rollgym_command("new", "my_env").code == 0
    package = tmp_path / "my_env"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *words]
        return subprocess.run(command, cwd=package, capture_output=True, text=True)

    tests = run("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly")
    assert tests.returncode == 0, tests.stdout + tests.stderr
    assert "3 passed" in tests.stdout
    words = ("my_env/MyEnv-v0", "--env-module", "my_env")
    checked = run("rollgym", "check", *words, "--quick")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    played = run(
        "rollgym", "eval", *words, "--agent", "expert", "--episodes", "20", "--workers", "2", "--json"
    )
    assert json.loads(played.stdout)["success_rate"] == 1.0
    assert "already exists" in rollgym_command("new", "my_env").err


def test_a_new_package_is_found_once_installed(rollgym_command: Command, tmp_path: Path) -> None:
    rollgym_command("new", "other_env")
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--target", str(target), str(tmp_path / "other_env")]
    installed = subprocess.run(command, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    code = (
        "import rollgym, gymnasium\n"
        "gymnasium.make('other_env/OtherEnv-v0').reset(seed=0)\n"
        "rollgym.make('other_env/OtherEnv-v0').reset(seed=0)\n"
    )
    environment = {"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_version_and_help_answer_without_heavy_imports() -> None:
    code = (
        "import sys\n"
        "from rollgym.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'ray', 'transformers', 'httpx', 'asyncio', 'rich.table'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "Commands:" in ran.stdout
