"""A package written with the template of 0.1.0: the messages state what to change, and then it works."""

import os
import subprocess
import sys
from pathlib import Path
from string import Template

import pytest

import rollgym

OLD = Path(__file__).parents[1] / "fixtures" / "template_0_1_0"
"""The files that ``rollgym new`` of 0.1.0 wrote, verbatim."""
ROOT = Path(__file__).parents[2]
ENV_ID = "old_env/OldEnv-v0"
ENV_MESSAGE = "ImportError: rollgym.Reply was renamed in 0.2.0: use rollgym.StepResult"
TEST_MESSAGE = (
    "ModuleNotFoundError: rollgym.check was renamed in 0.2.0: use rollgym.check(env), or rollgym.checks for "
    "its rules and report types"
)


@pytest.fixture
def package(tmp_path):
    """The folder of the package, as ``rollgym new old_env`` of 0.1.0 wrote it."""
    files = {
        "pyproject.toml.txt": "pyproject.toml",
        "init.py.txt": "old_env/__init__.py",
        "env.py.txt": "old_env/env.py",
        "expert.py.txt": "old_env/expert.py",
        "test_env.py.txt": "tests/test_env.py",
    }
    folder = tmp_path / "old_env"
    for source, name in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = Template((OLD / source).read_text())
        (folder / name).write_text(text.substitute(package="old_env", title="OldEnv", env_id=ENV_ID))
    return folder


def install(package):
    """Write the metadata that makes the folder an installed distribution with its entry point."""
    about = package / "old_env-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: old_env\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[rollgym.envs]\nold_env = old_env:register\n")


def apply_the_changes(package):
    """Make the changes that the messages name, and no others."""
    env = package / "old_env" / "env.py"
    env.write_text(env.read_text().replace("Reply", "StepResult"))
    test = package / "tests" / "test_env.py"
    text = test.read_text().replace("from rollgym.check import check_env\n", "")
    test.write_text(text.replace("check_env(", "rollgym.check("))


def run(package, *words, path=()):
    paths = [*map(str, path), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True)


def test_the_commands_name_the_new_name_and_work_after_the_change(package):
    for command in ("check", "eval"):
        ran = run(package, "rollgym", command, ENV_ID, "--env-module", "old_env")
        assert ran.returncode == 1
        assert ENV_MESSAGE in " ".join(ran.stdout.split() + ran.stderr.split()), ran.stdout + ran.stderr
    ran = run(package, "rollgym", "eval", ENV_ID, "--env-module", "old_env")
    assert ran.stderr == f"rollgym: {ENV_ID} cannot be made: {ENV_MESSAGE}\n"
    apply_the_changes(package)
    ran = run(package, "rollgym", "check", ENV_ID, "--env-module", "old_env", "--quick")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    words = ("--env-module", "old_env", "--agent", "expert", "--episodes", "5")
    ran = run(package, "rollgym", "eval", ENV_ID, *words)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_installed_plugin_names_the_new_name_and_works_after_the_change(package, tmp_path):
    install(package)
    words = ("rollgym", "eval", ENV_ID, "--agent", "expert", "--episodes", "5")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ran = run(elsewhere, *words, path=[package])
    assert (ran.returncode, ran.stderr) == (1, f"rollgym: {ENV_ID} cannot be made: {ENV_MESSAGE}\n")
    apply_the_changes(package)
    ran = run(elsewhere, *words, path=[package])
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_its_tests_name_the_new_module_and_pass_after_the_change(package):
    words = ("pytest", "-q", "-p", "no:cacheprovider")
    ran = run(package, *words)
    assert ran.returncode != 0
    assert TEST_MESSAGE in ran.stdout
    apply_the_changes(package)
    ran = run(package, *words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("from rollgym.text import Reply", "rollgym.text was renamed in 0.2.0: use rollgym.core.env "),
        ("from rollgym.registry import register", "rollgym.registry was renamed in 0.2.0: use "),
        ("from rollgym import Reply", "rollgym.Reply was renamed in 0.2.0: use rollgym.StepResult"),
    ],
)
def test_a_module_or_plugin_with_an_old_import_says_which(package, statement, sentence):
    (package / "old_env" / "__init__.py").write_text(f"{statement}\n")
    ran = run(package, "rollgym", "envs", "--env-module", "old_env")
    assert ran.returncode == 2
    assert ran.stderr.startswith("rollgym: --env-module old_env: ")
    assert sentence in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    install(package)
    ran = run(package, "rollgym", "agents", path=[package])
    assert ran.returncode == 0
    assert "the plugin 'old_env' (old_env:register) could not register its environments: " in ran.stderr
    assert sentence in ran.stderr


def test_the_template_of_this_version_uses_no_old_name():
    new = Path(rollgym.__file__).parent / "templates" / "new_env"
    assert {file.name for file in new.iterdir()} == {file.name for file in OLD.iterdir()}
    text = "".join(file.read_text() for file in new.iterdir())
    assert "Reply" not in text
    assert "rollgym.check import" not in text
