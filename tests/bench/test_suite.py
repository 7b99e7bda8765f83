"""Suites: what a file may say, and what is refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollgym.bench.suite import (
    AgentSpec,
    Golden,
    find_suite,
    known_suites,
    plan_entry,
    read_suite,
    suite_from,
)
from rollgym.core.errors import RollgymError, UnknownName, UsageError
from rollgym.core.registry import env_info, find_spec

from .conftest import SUITE, write_suite

WHO = AgentSpec(agent="random", options={}, modules=("faulty",))


def refused(folder: Path, text: str) -> str:
    with pytest.raises(UsageError) as found:
        read_suite(write_suite(folder, text))
    return str(found.value)


def test_the_suites_that_ship() -> None:
    assert list(known_suites()) == ["code", "core", "smoke", "sokoban", "webshop"]


@pytest.mark.parametrize("name", known_suites())
def test_a_shipped_suite_pins_its_tasks_and_has_golden_scores(name: str) -> None:
    suite = find_suite(name)
    assert suite.name == name
    for entry in suite.entries:
        find_spec(entry.env)
        if not entry.data:
            assert entry.task_set
            assert entry.content
            assert entry.success
            assert list(entry.golden) == ["random", env_info(entry.env).expert_is]
            assert all(golden.tolerance == 0 for golden in entry.golden.values())


def test_core_has_every_environment_that_needs_no_data_and_no_browser() -> None:
    from rollgym.core.registry import list_envs

    ours = {c.env_id for c in list_envs() if c.env_id.startswith("rollgym/") and "browser" not in c.needs}
    assert {entry.env for entry in find_suite("core").entries} == ours


@pytest.mark.parametrize("name", ["smoke", "sokoban"])
def test_the_pinned_task_sets_are_those_of_the_environments(name: str) -> None:
    suite = find_suite(name)
    for entry in suite.entries:
        assert len(plan_entry(suite, entry, WHO).specs) == entry.tasks * entry.samples


def test_a_suite_survives_a_round_trip_and_its_hash_sees_every_change(tmp_path: Path) -> None:
    suite = read_suite(write_suite(tmp_path))
    assert suite_from(json.loads(json.dumps(suite.to_json())), "a copy").fingerprint == suite.fingerprint
    for before, after in (
        ("tasks = 6", "tasks = 7"),
        ("seed = 5", "seed = 6"),
        ("version = 3", "version = 4"),
    ):
        assert (
            read_suite(write_suite(tmp_path, SUITE.replace(before, after))).fingerprint != suite.fingerprint
        )


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("schema = 1", "schema = 2", "schema 2, but this rollgym reads up to 1: upgrade"),
        ("tasks = 6", "taks = 6", "unknown field `taks`"),
        ("tasks = 6", 'tasks = "six"', "Expected `int`, got `str`"),
        ("tasks = 6", "tasks = -1", "needs tasks >= 0"),
        ('name = "twice"', 'name = "alone"', "two entries are called 'alone'"),
        ('name = "twice"', 'name = "../up"', "an entry's name may contain a-z"),
        ("max_turns = 10", "max_turns = 0", "limits.turns must be positive"),
        ("max_turns = 10", "golden.wizard = { success = 1, score = 1 }", "golden score of 'wizard'"),
        ("max_turns = 10", "golden.random = { success = 7, score = 1 }", "between 0 and 1"),
        ("version = 3", "version = 0", "version must be at least 1"),
        ("schema = 1", "schema =", "is not TOML"),
    ],
)
def test_a_bad_suite_is_refused_with_a_sentence(
    tmp_path: Path, before: str, after: str, sentence: str
) -> None:
    assert sentence in refused(tmp_path, SUITE.replace(before, after))


def test_a_suite_without_entries_is_refused(tmp_path: Path) -> None:
    assert "is not a suite" in refused(tmp_path, SUITE[: SUITE.index("[[entries]]")])


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(UnknownName, match=r"Did you mean smoke\?"):
        find_suite("smok")


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('env = "faulty:Counting"\ntasks', 'env = "rollgym/Sokobn-v0"\ntasks', "rollgym/Sokoban-v0"),
        ('split = "dev"', 'split = "exam"', "no split called 'exam'"),
        ("tasks = 3", "tasks = 3000", "has 1000 tasks, too few"),
        ("tasks = 6", 'tasks = 6\nkwargs = { color = "red" }', "unexpected keyword argument 'color'"),
        ("tasks = 6", 'tasks = 6\ntask_set = "0123456789abcdef"', "made for the task set '0123456789abcdef'"),
        ("the episode reports success", "luck", "made for the definition of success 'luck'"),
    ],
)
def test_unknown_tasks_and_environments_are_named_with_their_entry(
    tmp_path: Path, before: str, after: str, sentence: str
) -> None:
    suite = read_suite(write_suite(tmp_path, SUITE.replace(before, after)))
    with pytest.raises(RollgymError) as found:
        [plan_entry(suite, entry, WHO) for entry in suite.entries]
    assert sentence in str(found.value)
    assert "Suite little 3, entry '" in str(found.value)


def test_all_tasks_of_a_split_are_asked_for_with_0(tmp_path: Path) -> None:
    suite = read_suite(write_suite(tmp_path, SUITE.replace("tasks = 6", "tasks = 0")))
    assert len(plan_entry(suite, suite.entry("alone"), WHO).specs) == 1000


def test_golden_scores_are_those_of_plain_agents_only() -> None:
    bandit = find_suite("smoke").entry("bandit")
    found = bandit.golden_of("expert", {})
    assert found is not None
    assert found[0] == "baseline", "this environment's expert promises nothing"
    assert isinstance(found[1], Golden)
    assert bandit.golden_of("random", {"depth": 3}) is None
    assert bandit.golden_of("chat", {}) is None
