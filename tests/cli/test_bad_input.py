"""A user's mistake is one clear sentence and exit code 2; a failure is exit code 1. Never a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]

MISTAKES = [
    ("eval rollgym/Sokobann-v0", "Did you mean rollgym/Sokoban-v0"),
    ("eval rollgym/Sokoban-v9", "no environment called 'rollgym/Sokoban-v9'"),
    ("eval sokoban", "Did you mean"),
    ("eval faulty:Countin", "Did you mean Counting?"),
    ("eval no_such_module:Env", "no such module on the Python path"),
    ("eval faulty:Counting --agent expret", "Did you mean expert?"),
    ("eval faulty:Counting --agent expert", "has no expert"),
    ("eval faulty:Counting --agent no_such_module:agent", "no such module on the Python path"),
    ("eval faulty:Counting --agent faulty:Counting", "cannot be made"),
    ("eval faulty:Counting --agent random --agent-arg speed=3", "no option of agent 'random' called 'speed'"),
    ("eval faulty:Counting --split tets", "Did you mean test?"),
    ("eval faulty:Counting --episodes 0", "--episodes must be at least 1"),
    ("eval faulty:Counting --episodes 10 --per-task 3", "not a multiple"),
    ("eval faulty:Counting --episodes 2000", "has 1000 tasks"),
    ("eval faulty:Counting --seed -1", "--seed must be at least 0"),
    ("eval faulty:Counting --workers -1", "--workers must be at least 0"),
    ("eval faulty:Counting --max-turns 0", "must be positive"),
    ("eval faulty:Counting --env-arg nonsense", "expected key=value"),
    ("eval faulty:Counting --env-arg color=red", "unexpected keyword argument 'color'"),
    ("eval faulty:Counting --env-module no_such_module", "--env-module no_such_module"),
    ("eval faulty:Counting --resume", "--resume needs --out"),
    ("eval faulty:Counting --resume --out nowhere", "Nothing to resume in nowhere"),
    ("compare nowhere elsewhere", "Run folder nowhere does not exist"),
    ("check rollgym/Sokobann-v0", "Did you mean rollgym/Sokoban-v0"),
    ("check faulty:Counting --rule determinstic", "Did you mean deterministic?"),
    ("play rollgym/Sokobann-v0", "Did you mean rollgym/Sokoban-v0"),
    ("eval rollgym/Nim-v0 --role player_3=expert", "Roles: player_1, player_2."),
    ("eval rollgym/Nim-v0 --role player_2", "expected ROLE=AGENT"),
    ("eval rollgym/Nim-v0 --role player_2=expret", "Did you mean expert"),
    ("eval rollgym/Nim-v0 --role-arg player_2.model=x", "for a role given with --role"),
    ("eval rollgym/Nim-v0 --role player_1=random --role player_2=random", "plays none: leave one out"),
    ("eval rollgym/FrozenLake-v0 --role player_2=random", "has no roles: one agent plays it"),
    ("play rollgym/FrozenLake-v0 --role player_2=random", "has no roles: one agent plays it"),
    ("new My-Env", "Invalid package name"),
    ("new class", "Invalid package name"),
    ("new rollgym", "is taken"),
]


@pytest.mark.parametrize(("words", "sentence"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_sentence_and_exit_code_2(
    rollgym_command: Command, tmp_path: Path, words: str, sentence: str
) -> None:
    ran = rollgym_command(*words.split())
    assert ran.code == 2, ran.err
    assert sentence in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert ran.out == ""
    assert not list(tmp_path.iterdir()), "a refused command leaves nothing behind"


def test_a_wrong_type_of_value_is_named(rollgym_command: Command) -> None:
    ran = rollgym_command("eval", "faulty:Counting", "--episodes", "many")
    assert ran.code == 2
    assert "Invalid value for '--episodes'" in ran.err


def test_results_are_never_overwritten(rollgym_command: Command, tmp_path: Path) -> None:
    rollgym_command("eval", "faulty:Counting", "--episodes", 2, "--out", "r")
    before = (tmp_path / "r" / "episodes.jsonl").read_bytes()
    ran = rollgym_command("eval", "faulty:Counting", "--episodes", 2, "--out", "r")
    assert ran.code == 2
    assert "already contains results" in ran.err
    assert (tmp_path / "r" / "episodes.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [(("--seed", 4), "seed"), (("--split", "dev"), "split"), (("--agent", "faulty:Yes"), "agent")],
)
def test_resume_refuses_other_settings(
    rollgym_command: Command, change: tuple[Any, ...], sentence: str
) -> None:
    words = ("eval", "faulty:Counting", "--episodes", 2, "--out", "r")
    rollgym_command(*words)
    ran = rollgym_command(*words, "--resume", *change)
    assert ran.code == 2
    assert f"was created with {sentence}" in ran.err


def test_a_broken_results_file_is_named_with_its_line(rollgym_command: Command, tmp_path: Path) -> None:
    words = ("eval", "faulty:Counting", "--episodes", 4, "--out", "r")
    rollgym_command(*words)
    file = tmp_path / "r" / "episodes.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b'{"schema": 1, "spec": 3}\n' + lines[2])
    before = file.read_bytes()
    ran = rollgym_command(*words, "--resume")
    assert ran.code == 1
    assert "episodes.jsonl, line 2" in ran.err
    assert file.read_bytes() == before, "a file that cannot be read is left alone"


def test_a_newer_schema_is_refused_with_both_versions(rollgym_command: Command, tmp_path: Path) -> None:
    words = ("eval", "faulty:Counting", "--episodes", 2, "--out", "r")
    rollgym_command(*words)
    file = tmp_path / "r" / "episodes.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"schema":2', b'"schema":99'))
    ran = rollgym_command(*words, "--resume")
    assert ran.code == 1
    assert "schema 99, but this rollgym reads up to 2" in ran.err


def test_a_folder_that_cannot_be_written_is_named(rollgym_command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = rollgym_command("eval", "faulty:Counting", "--episodes", 2, "--out", "file/r")
    assert ran.code == 2
    assert "Cannot write results to file/r" in ran.err


def test_an_environment_that_raises_in_reset_is_named_by_play_and_check(rollgym_command: Command) -> None:
    ran = rollgym_command("play", "faulty:RaisesInReset")
    assert ran.code == 1
    assert "raised in reset(): RuntimeError: the shop is closed" in ran.err
    ran = rollgym_command("check", "faulty:RaisesInReset", "--json")
    assert ran.code == 1
    assert not json.loads(ran.out)["ok"]


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rollgym.cli import main
    from rollgym.core.errors import UnknownName

    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownName):
        main(["eval", "rollgym/Sokobann-v0", "--debug"])
