"""What ``import rollgym`` offers, and what it costs."""

import ast
import subprocess
import sys
import types
from pathlib import Path

import pytest

import rollgym

HEAVY = {"torch", "ray", "transformers", "httpx", "sglang", "deepspeed", "typer", "rich"}
KEPT_BACK = {"load_plugins", "register_built_in"}
"""Names that ``rollgym/__init__.py`` needs for itself alone."""


def imported_names():
    tree = ast.parse(Path(rollgym.__file__).read_text())
    lines = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for line in lines for alias in line.names}


def test_the_exports_are_sorted_and_unique():
    assert rollgym.__all__ == sorted(set(rollgym.__all__))


def test_every_public_name_that_is_imported_is_exported():
    assert set(rollgym.__all__) == {name for name in imported_names() if name[0] != "_"} - KEPT_BACK


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
