"""The docs against the code: commands parse, short ones run, Python blocks execute."""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import PAGES, ROOT, SMALL_RUN, blocks, command_names, commands, in_small, parse

RUN = [
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "evaluation",
            "reproducibility",
            "write_an_environment",
            "training",
            "roles",
            "trajectories",
            "sft",
            "dpo",
            "ray",
            "troubleshooting",
        )
    ),
]
"""Pages whose commands are run, in small; on all others they are parsed."""
RUN_SLOWLY = ["docs/benchmarks.md", "docs/builtin_policy.md", "docs/environments/webshop_agents.md"]
RUN_SLOWLY += [
    f"docs/environments/{name}.md"
    for name in ("mastermind", "minesweeper", "sudoku", "tower_of_hanoi", "twenty_forty_eight", "webshop")
]
ON_PAGES = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
Command = Callable[..., Any]


@ON_PAGES
def test_every_command_shown_exists_with_its_options_and_names(page: Path) -> None:
    for _, words in commands(page):
        if words[0] == "rollgym" and "|" not in words:
            try:
                parse(words[1:])
            except Exception as error:
                raise AssertionError(f"{shlex.join(words)}: {error}") from error


def test_a_wrong_command_is_found() -> None:
    for wrong in (
        "evaluate rollgym/Sokoban-v0",
        "eval rollgym/Sokoban-v0 --agents random",
        "eval rollgym/Sokobann-v0 --agent random",
        "eval rollgym/Sokoban-v0 --agent rnd",
        "bench run smoky --agent random",
        "train sokoban",
        "train sokoban-grpo steps=10",
        "config",
    ):
        with pytest.raises(Exception, match=r"\w"):
            parse(wrong.split())
    parse(["train", "sokoban-grpo", "stop.steps=10", "--out", "runs/x"])


@pytest.mark.parametrize("page", RUN)
def test_pages_can_be_followed(rollgym_command: Command, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    follow(page, rollgym_command, monkeypatch, ("parsed only", "slow"))


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("page", [*RUN, *RUN_SLOWLY])
def test_pages_can_be_followed_to_the_end(
    rollgym_command: Command, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    follow(page, rollgym_command, monkeypatch, ("parsed only",))


def follow(page: str, run: Command, monkeypatch: pytest.MonkeyPatch, leave_out: tuple[str, ...]) -> None:
    """Run the commands of a page from top to bottom, in small."""
    monkeypatch.setenv("COLUMNS", "100")
    for note, words in commands(ROOT / page):
        if note.startswith(leave_out) or "|" in words:
            continue
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
            monkeypatch.syspath_prepend(words[1])
            continue
        monkeypatch.setattr(sys, "stdin", io.StringIO("/quit\n"))
        ran = run(*in_small(words[1:]))
        assert ran.code == 0, f"{shlex.join(words)}\n{ran.out}\n{ran.err}"


@ON_PAGES
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(page, "python"):
        if not block.note.startswith("not run"):
            with contextlib.redirect_stdout(io.StringIO()):
                # At its own lines: pydantic reads the docstrings of fields from the file.
                above = page.read_text().partition(block.text)[0].count("\n")
                exec(compile("\n" * above + block.text, str(page), "exec"), names)  # noqa: S102


def test_the_training_example_of_the_first_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    yaml: Any = pytest.importorskip("yaml")
    import rollgym

    examples = [
        next(block.text for block in blocks(ROOT / page, "python") if "rollgym.train(" in block.text)
        for page in ("README.md", "docs/index.md")
    ]
    assert examples[0] == examples[1]
    assert len(examples[0].strip().splitlines()) <= 15
    small = {key: yaml.safe_load(value) for key, value in (word.split("=") for word in SMALL_RUN)}
    train = rollgym.train
    monkeypatch.setattr(
        rollgym, "train", lambda config, **given: train(config, plain=True, **{**given, **small})
    )
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(examples[0], "README.md", "exec"), {"__name__": "docs"})  # noqa: S102
    assert "held-out success" in output.getvalue()


def test_the_first_pages_say_what_rollgym_is() -> None:
    for page in ("README.md", "docs/index.md"):
        first = (ROOT / page).read_text().split("\n\n")[1].replace("**", "")
        assert "reinforcement learning" in first
        assert "LLM agents" in first


def test_pages_named_in_sources_exist() -> None:
    for folder in ("rollgym", "envs", "agents", "trainer", "examples", "benchmarks", "tests"):
        for source in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"docs/[\w/]+\.md", source.read_text(encoding="utf-8")):
                assert (ROOT / name).exists() or folder == "tests", f"{source.relative_to(ROOT)} names {name}"


def test_the_security_page_is_short() -> None:
    assert len((ROOT / "docs/security.md").read_text().split()) < 1_500


def test_the_stability_page_lists_the_public_names() -> None:
    import rollgym

    rows = re.findall(r"^\| (`.*?`) \| .* \|$", (ROOT / "docs/api_stability.md").read_text(), re.MULTILINE)
    shown = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert shown == set(rollgym.__all__)


@ON_PAGES
def test_what_is_not_run_says_why(page: Path) -> None:
    for block in blocks(page, "python"):
        assert re.match(r"(not run: \w.*)?$", block.note), block.note
    for block in blocks(page, "sh"):
        assert re.match(r"(parsed only: \w.*|slow(: \w.*)?)?$", block.note), block.note


@ON_PAGES
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@ON_PAGES
def test_commands_named_in_a_sentence_exist(page: Path) -> None:
    for word in re.findall(r"`rollgym ([a-z]+)", page.read_text()):
        assert word in command_names(), f"there is no command {word}"


def test_every_environment_has_a_page() -> None:
    from rollgym.core.registry import list_envs

    packages = {init.parent.name for init in (ROOT / "envs").glob("*/__init__.py")}
    pages = {page.stem: page.read_text() for page in (ROOT / "docs" / "environments").glob("*.md")}
    further = {page for page in pages if any(page.startswith(f"{name}_") for name in packages)}
    assert packages == set(pages) - further - {"index"}
    for card in list_envs():
        if card.env_id.startswith("rollgym/"):
            assert any(f"`{card.env_id}`" in text for name, text in pages.items() if name != "index"), (
                card.env_id
            )
            assert f"`{card.env_id}`" in pages["index"], card.env_id


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
