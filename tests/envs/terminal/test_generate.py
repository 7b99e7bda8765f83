"""Generated tasks: the same everywhere, different from each other, unsolved at the start."""

import shutil
import subprocess
from pathlib import Path

import pytest

from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.seeding import derive_rng
from rollgym.envs.terminal.families.base import LEVELS
from rollgym.envs.terminal.generate import FAMILIES, KINDS, SPLITS, Generated
from rollgym.envs.terminal.git_repo import Repo
from rollgym.envs.terminal.harness import holds, write_tree

EACH = [(name, level) for name in KINDS for level in LEVELS]


@pytest.mark.parametrize(("name", "level"), EACH)
def test_a_task_is_the_same_every_time_and_needs_work(name: str, level: int) -> None:
    for number in range(3):
        first, second = (KINDS[name].task(derive_rng("t", number), level) for _ in range(2))
        assert (first, first.key) == (second, second.key)
        assert (first.kind, first.level) == (name, level)
        static = [holds(check.to_json(), first.tree) for check in first.checks if check.kind != "run"]
        runs = [check for check in first.checks if check.kind == "run"]
        assert runs or not all(static)
        assert sum(len(entry["content"]) for entry in first.tree.values()) < 200_000


@pytest.mark.parametrize(("name", "level"), EACH)
def test_the_expert_knows_what_the_instruction_states(name: str, level: int) -> None:
    """Words for options and columns stand for their technical form; everything else is literal."""
    for number in range(3):
        task = KINDS[name].task(derive_rng("t", number), level)
        for key, value in task.parameters.items():
            if key not in ("level", "option", "column"):
                assert str(value) in task.instruction, (key, value)


def test_thousands_of_tasks_and_none_twice() -> None:
    source = Generated()
    assert min(SPLITS.values()) >= 1000
    keys = {split: set[str]() for split in SPLITS}
    for split, found in keys.items():
        for index in range(40):
            task = source.load(source.tasks.task(split, index))
            assert source.tasks.home(task.key) == split
            found.add(task.key)
    assert {split: len(found) for split, found in keys.items()} == dict.fromkeys(SPLITS, 40)
    assert not keys["train"] & keys["dev"] | keys["train"] & keys["test"] | keys["dev"] & keys["test"]


def test_families_and_level_choose() -> None:
    source = Generated(["git", "logs"], 2)
    tasks = [source.load(source.tasks.task("train", index)) for index in range(30)]
    assert {task.family for task in tasks} == {"git", "logs"}
    assert {task.level for task in tasks} == {2}
    everything = Generated()
    drawn = [everything.load(everything.tasks.task("dev", index)) for index in range(60)]
    assert {task.family for task in drawn} == set(FAMILIES)
    assert {task.level for task in drawn} == set(LEVELS)


def test_options_that_do_not_exist_are_named() -> None:
    with pytest.raises(UnknownName, match="gti"):
        Generated(["gti"])
    with pytest.raises(UsageError, match="level must be 1, 2 or 3"):
        Generated(level=4)
    with pytest.raises(UsageError, match="list of names"):
        Generated("git")
    with pytest.raises(UsageError, match="list of names"):
        Generated([])


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_accepts_a_repository_that_was_built_without_it(tmp_path: Path) -> None:
    repo = Repo()
    first = repo.commit({"a.txt": "1\n", "b/c.txt": "2\n", "b-d.txt": "3\n"}, "First")
    second = repo.commit({"a.txt": "1\n2\n", "b/c.txt": "2\n"}, "Second", [first])
    repo.branches, repo.tags = {"main": second, "old": first}, {"v1": first}
    write_tree(str(tmp_path), repo.tree("r"))

    def git(*words: str) -> str:
        ran = subprocess.run(["git", *words], cwd=tmp_path / "r", capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    assert git("fsck", "--strict", "--full") == ""
    assert git("status", "--porcelain") == ""
    assert git("log", "--format=%H %s") == f"{second} Second\n{first} First"
    assert git("rev-parse", "old", "v1") == f"{first}\n{first}"
    assert git("show", "v1:b/c.txt") == "2"
