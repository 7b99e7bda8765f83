"""Plain technical English in messages, help texts, docstrings and docs; see tools/dialect.py."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import dialect  # noqa: E402


def found_in(folder: Path, name: str, text: str) -> list[str]:
    (folder / name).write_text(text)
    return [hit.name for hit in dialect.find([folder / name])]


def test_no_unexplained_phrase() -> None:
    hits = dialect.find([ROOT / name for name in dialect.SCOPE])
    assert [str(hit) for hit in dialect.unexplained(hits, dialect.read_allow_list())] == []


def test_every_entry_of_the_allow_list_is_used() -> None:
    hits = dialect.find([ROOT / name for name in dialect.SCOPE])
    unused = [entry for entry in dialect.read_allow_list() if not any(entry.covers(hit) for hit in hits)]
    assert unused == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{x} is no folder.", "is no X"),
        ("It is built\n    anew.", "anew"),
        ("A thread of its own.", "of its own"),
        ("Whoever asks waits.", "whoever"),
        ("The agent is told the goal.", "is told"),
        ("The strategy local is of one rank.", "is of X"),
        ("Runs on a processor.", "processor"),
        ("What becomes of episodes.", "becomes of"),
        ("Requests under way.", "under way"),
    ],
)
def test_a_phrase_is_found_in_a_message(tmp_path: Path, text: str, name: str) -> None:
    assert found_in(tmp_path, "a.py", f'raise ValueError(f"""{text}""")\n') == [name]
    assert found_in(tmp_path, "a.py", f"# {text.splitlines()[0]}\n") == ([name] if "\n" not in text else [])
    assert found_in(tmp_path, "a.md", f"Some words. {text}\n") == [name]


@pytest.mark.parametrize(
    "text",
    [
        "There is no config at {x}.",
        "It is no longer there.",
        "Preprocessors and CPUs.",
        "Tensors are of shape [N].",
        "Whether the run is paused.",
        "Splits are told apart by name.",
    ],
)
def test_plain_english_is_not_a_hit(tmp_path: Path, text: str) -> None:
    assert found_in(tmp_path, "a.py", f'"""{text}"""\n') == []


def test_a_noun_clause_is_a_hit_only_as_a_title(tmp_path: Path) -> None:
    assert found_in(tmp_path, "a.py", '"""What an agent is."""\n') == ["clause as a title"]
    assert found_in(tmp_path, "a.py", 'print("What an agent is.")\n') == []
    assert found_in(tmp_path, "a.md", "# What is checked\n\nWhat is checked is a list.\n") == [
        "clause as a title"
    ]
    assert found_in(tmp_path, "a.md", "# How an episode ends\n") == []


def test_code_on_a_page_is_not_read(tmp_path: Path) -> None:
    assert found_in(tmp_path, "a.md", "```text\nanew\n```\n\n`anew` <!-- anew -->\n") == []


def test_the_command_prints_each_phrase_and_fails(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("Built anew.\n")
    command = [sys.executable, str(ROOT / "tools" / "dialect.py"), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stdout.splitlines() == [f"{tmp_path}/a.md:1: [anew] Built anew.", "1 unexplained, 0 explained"]
