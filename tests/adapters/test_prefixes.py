"""Ids with a prefix: one resolver, without any of the other libraries."""

import importlib.metadata
import subprocess
import sys

import gymnasium as gym
import pytest

import rollgym
from rollgym.adapters.prefixes import PREFIXES
from rollgym.core.env import StepResult, TextEnv
from rollgym.core.env_prefixes import EnvPrefix, find_prefix, register_prefix
from rollgym.core.errors import UsageError
from rollgym.core.registry import find_spec, is_registered
from rollgym.core.trust import check_recorded_env
from rollgym.utils.env_info import package_versions

ECHO = EnvPrefix(
    name="echo_test",
    entry_point=f"{__name__}:Echo",
    package="numpy",
    module="numpy",
    versions=(int(importlib.metadata.version("numpy").split(".")[0]),),
    example="echo_test:hello",
    summary="Repeat a word",
    from_files=False,
)


class Echo(TextEnv):
    instructions = "Answer with the word."

    def __init__(self, *, inner_id, bonus=0.0, render_mode=None):
        self.word, self.bonus = inner_id, bonus
        super().__init__(render_mode=render_mode)

    def begin(self, task):
        return self.word

    def respond(self, action):
        right = action == self.word
        return StepResult("", float(right) + self.bonus, terminated=True, success=right)


@pytest.fixture(autouse=True)
def prefix(monkeypatch):
    monkeypatch.setattr("rollgym.core.env_prefixes._prefixes", {p.name: p for p in PREFIXES})
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Echo.__module__])
    register_prefix(ECHO)


def test_every_way_to_name_an_environment_takes_a_prefix(tmp_path):
    env = rollgym.make("echo_test:hello", bonus=0.5)
    assert env.reset(seed=0)[0] == "hello"
    assert env.step("hello")[1] == 1.5
    made = gym.make(find_spec("echo_test:hello"), disable_env_checker=True)
    assert made.reset(seed=0)[0] == "hello"
    results = rollgym.evaluate(
        "echo_test:hello", lambda observation, info: observation, episodes=3, out=tmp_path / "run"
    )
    assert results.summary["success_rate"] == 1.0
    assert next(iter(results.episodes)).spec.env_id == "echo_test:hello"


def test_the_spec_of_an_address_is_valid_and_keeps_the_address():
    spec = ECHO.spec("echo_test:ws://127.0.0.1:8000/a b")
    assert spec.id == "echo_test:ws:-127.0.0.1:8000-a-b"
    assert spec.kwargs == {"inner_id": "ws://127.0.0.1:8000/a b"}


def test_a_prefix_without_a_name_is_refused_with_an_example():
    with pytest.raises(UsageError, match="for example echo_test:hello"):
        rollgym.make("echo_test:")


def test_versions_of_the_other_library_are_recorded():
    assert package_versions("echo_test:hello")["numpy"] == importlib.metadata.version("numpy")


def test_an_absent_package_is_one_sentence_with_the_command():
    absent = EnvPrefix(
        name="absent", entry_point="x:y", package="no-such-package-here", module="nothing", versions=(1, 2),
        example="absent:x", summary="",
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"pip install 'no-such-package-here==1\.2\.\*'$"):
        absent.load()


def test_another_version_is_refused_with_both_versions(monkeypatch):
    monkeypatch.setattr("rollgym.core.env_prefixes.version", lambda package: "99.1.0")
    with pytest.raises(UsageError, match=r"tested with numpy==\d+\.\*, but numpy 99\.1\.0 is installed"):
        ECHO.load()


def test_a_version_of_the_tested_series_is_loaded():
    assert ECHO.load().__name__ == "numpy"


def test_a_file_cannot_name_code_or_an_address_by_a_prefix():
    assert not is_registered("echo_test:hello")
    with pytest.raises(UsageError, match=f"not opened.*--env-module {__name__}"):
        check_recorded_env("echo_test:hello", {})
    check_recorded_env("echo_test:hello", {}, modules=[__name__])
    check_recorded_env("reasoning_gym:leg_counting", {})


def test_an_unknown_prefix_names_the_known_ones():
    with pytest.raises(UsageError) as caught:
        rollgym.make("textareno:TicTacToe-v0")
    assert "no such prefix. The prefixes are " in str(caught.value)
    assert "reasoning_gym, textarena" in str(caught.value)
    assert str(caught.value).endswith("Did you mean textarena:TicTacToe-v0?")


def test_the_table_of_prefixes_is_consistent():
    for prefix in PREFIXES:
        assert find_prefix(prefix.example) is prefix
        assert prefix.entry_point.startswith("rollgym.adapters.")


def test_importing_rollgym_imports_no_adapted_library():
    names = sorted({prefix.module for prefix in PREFIXES})
    code = f"import sys, rollgym; print([n for n in {names} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
