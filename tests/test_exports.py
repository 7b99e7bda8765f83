"""The public names of ``import rollgym``, and the cost of the import."""

import ast
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import rollgym

HEAVY = {"torch", "ray", "transformers", "httpx", "sglang", "deepspeed", "typer", "rich"}


def names_for_type_checkers():
    """The names that ``rollgym/__init__.py`` declares for type checkers, by module."""
    tree = ast.parse(Path(rollgym.__file__).read_text())
    (block,) = [
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    lines = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: line.module for line in lines for alias in line.names}


def test_the_exports_are_sorted_and_unique():
    assert rollgym.__all__ == sorted(set(rollgym.__all__))


def test_type_checkers_and_programs_see_the_same_names():
    homes = {name: f"rollgym.{module}" for name, module in rollgym._HOME_OF.items()}
    assert names_for_type_checkers() == homes
    assert set(rollgym.__all__) == set(homes)


@pytest.mark.parametrize("name", rollgym.__all__)
def test_every_export_is_documented_with_an_example_and_not_a_module(name):
    value = getattr(rollgym, name)
    assert not isinstance(value, types.ModuleType)
    assert value.__module__.startswith("rollgym.")
    assert value.__doc__
    assert "Example:\n" in inspect.cleandoc(value.__doc__), name
    assert ">>> " in value.__doc__


def test_the_docs_list_every_export_and_no_other():
    page = (Path(rollgym.__file__).parents[1] / "docs" / "reference" / "api.md").read_text()
    assert re.findall(r"^\| `rollgym\.(\w+)", page, re.MULTILINE) == rollgym.__all__


def test_dir_lists_the_exports():
    assert set(rollgym.__all__) <= set(dir(rollgym))


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
