"""What the docs show is true: commands parse, those that can run do run, Python blocks execute."""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from rollgym.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUN = ["README.md", "docs/index.md", "docs/evaluate.md", "docs/write_an_environment.md"]
BLOCK = re.compile(r"(<!--[^\n]*-->\n)?```(\w+)\n(.*?)```", re.DOTALL)
Command = Callable[..., Any]


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """(comment above, text) of a page's fenced blocks in one language."""
    return [(c or "", text) for c, kind, text in BLOCK.findall(page.read_text()) if kind == language]


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """(comment above, words) of every command a page shows."""
    found = []
    for comment, text in blocks(page, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] in ("rollgym", "cd"):
                found.append((comment, words))
    return found


def parse(words: list[str]) -> None:
    """Raise where a command or an option does not exist."""
    known: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert words[0] in known, f"there is no command {words[0]}"
    command, rest = known[words[0]], list(words[1:])
    while hasattr(command, "commands") and rest:
        command = command.commands[rest.pop(0)]
    command.make_context(words[0], rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_shown_exists_with_its_options(page: Path) -> None:
    for _, words in commands(page):
        if words[0] == "rollgym" and "|" not in words:
            parse(words[1:])


@pytest.mark.parametrize("page", RUN)
def test_the_main_pages_can_be_followed(
    rollgym_command: Command, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    shown = commands(ROOT / page)
    assert shown
    for comment, words in shown:
        if "parsed only" in comment:
            continue
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
            monkeypatch.syspath_prepend(words[1])
            continue
        monkeypatch.setattr(sys, "stdin", io.StringIO("/quit\n"))
        ran = rollgym_command(*words[1:])
        assert ran.code == 0, f"{shlex.join(words)}\n{ran.out}\n{ran.err}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "docs"}
    for comment, text in blocks(page, "python"):
        if "not run" not in comment:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text, str(page), "exec"), names)  # noqa: S102


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_environment_has_a_page() -> None:
    packages = {init.parent.name for init in (ROOT / "envs").glob("*/__init__.py")}
    pages = {page.stem for page in (ROOT / "docs" / "environments").glob("*.md")}
    further = {page for page in pages - packages if any(page.startswith(f"{name}_") for name in packages)}
    assert packages == pages - further


def test_no_machine_paths_in_the_tree() -> None:
    for page in PAGES:
        assert not re.search(r"/(root|home|work)/\w", page.read_text()), page


def test_every_rule_of_the_correctness_page_has_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (.+) \|$", (ROOT / "docs/correctness.md").read_text(), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 38))
    for number, cell in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert named, f"rule {number} has no test"
        for file, test in named:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(), (number, file, test)
