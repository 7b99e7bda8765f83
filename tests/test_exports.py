"""What ``import rollgym`` offers, and what it costs."""

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import rollgym

HEAVY = {"torch", "ray", "transformers", "httpx", "sglang", "deepspeed", "typer", "rich"}


def names_for_type_checkers():
    """What ``rollgym/__init__.py`` tells type checkers that it offers, by module."""
    tree = ast.parse(Path(rollgym.__file__).read_text())
    (block,) = [
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    lines = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: line.module for line in lines for alias in line.names}


def test_the_exports_are_sorted_and_unique():
    assert rollgym.__all__ == sorted(set(rollgym.__all__))


def test_type_checkers_and_programs_are_told_the_same():
    homes = {name: f"rollgym.{module}" for name, module in rollgym._HOME_OF.items()}
    assert names_for_type_checkers() == homes
    assert set(rollgym.__all__) == set(homes)


def test_the_help_of_the_command_waits_for_nothing_but_everything_else_registers(tmp_path):
    script = tmp_path / "rollgym"
    script.write_text("import sys, rollgym; print('gymnasium' in sys.modules)")

    def imported(*words):
        ran = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True)
        return ran.stdout.strip()

    assert [imported(*words) for words in (["--help"], ["eval", "-h"], [], ["envs"])] == ["False"] * 3 + [
        "True"
    ]


@pytest.mark.parametrize("name", rollgym.__all__)
def test_every_export_is_there_documented_and_no_module(name):
    found = getattr(rollgym, name)
    assert not isinstance(found, types.ModuleType)
    assert found.__doc__
    assert found.__module__.startswith("rollgym.")


def test_a_star_import_gives_exactly_the_exports():
    space: dict[str, object] = {}
    exec("from rollgym import *", space)  # noqa: S102
    assert set(space) - {"__builtins__"} == set(rollgym.__all__)


def test_import_rollgym_is_light_and_silent():
    code = f"import sys, rollgym; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_import_rollgym_imports_no_environment_and_no_agent():
    code = "import sys, rollgym; print([m for m in sys.modules if m.startswith('rollgym.envs.')"
    code += " or m.startswith('rollgym.agents') or m.startswith('rollgym.trainer')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
