"""Names of 0.1.0: an error states the new name, and nothing is forwarded."""

import importlib
import importlib.util
import os
import subprocess
import sys

import pytest

import rollgym
from rollgym.core.renamed import METRICS, MODULES, NAMES, RenamedModules


@pytest.mark.parametrize("old", sorted(NAMES))
def test_an_old_name_is_answered_with_the_new_one(old):
    sentence = f"^rollgym.{old} was renamed in 0.2.0: use rollgym.{NAMES[old]}$"
    with pytest.raises(ImportError, match=sentence):
        exec(f"from rollgym import {old}", {})  # noqa: S102
    with pytest.raises(ImportError, match=sentence):
        getattr(rollgym, old)
    assert NAMES[old] in rollgym.__all__


@pytest.mark.parametrize("old", sorted(MODULES))
def test_an_old_module_is_answered_with_the_new_one(old):
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(old)
    assert str(caught.value) == f"{old} was renamed in 0.2.0: use {MODULES[old]}"
    assert old not in sys.modules


@pytest.mark.parametrize("new", sorted({new.split("(")[0].split(",")[0].strip() for new in MODULES.values()}))
def test_the_new_module_or_name_exists(new):
    parent, _, name = new.rpartition(".")
    exists = importlib.util.find_spec(new) if new not in MODULES else None
    assert exists is not None or (parent == "rollgym" and name in rollgym.__all__)


def test_a_module_below_an_old_package_is_answered_too():
    with pytest.raises(ModuleNotFoundError, match=r"rollgym\.scheduler was renamed .* rollgym\.rollout"):
        importlib.import_module("rollgym.scheduler.board")


def test_a_folder_that_an_upgrade_left_behind_does_not_hide_the_message(tmp_path):
    (tmp_path / "rollgym" / "check" / "__pycache__").mkdir(parents=True)
    code = (
        "import rollgym, sys\n"
        f"rollgym.__path__.append({str(tmp_path / 'rollgym')!r})\n"
        "try: import rollgym.check\n"
        "except ModuleNotFoundError as error: print(error)\n"
        "print(callable(rollgym.check))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert ran.stdout.splitlines() == [
        f"rollgym.check was renamed in 0.2.0: use {MODULES['rollgym.check']}",
        "True",
    ], ran.stderr


def test_submodules_never_replace_public_names():
    for name in ("checks", "evaluation", "trainer"):
        importlib.import_module(f"rollgym.{name}")
    for name in rollgym.__all__:
        if f"rollgym.{name}" not in MODULES:
            assert importlib.util.find_spec(f"rollgym.{name}") is None, name
        assert callable(getattr(rollgym, name))


def test_other_names_get_pythons_own_errors():
    assert sum(isinstance(finder, RenamedModules) for finder in sys.meta_path) == 1
    with pytest.raises(ModuleNotFoundError, match="No module named 'rollgym.no_such_module'"):
        importlib.import_module("rollgym.no_such_module")
    with pytest.raises(AttributeError, match="module 'rollgym' has no attribute 'no_such_name'"):
        _ = rollgym.no_such_name
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec("from rollgym import no_such_name", {})  # noqa: S102


def test_no_metric_is_both_old_and_new():
    assert not set(METRICS) & set(METRICS.values())
