"""The pip command for missing optional dependencies, for each kind of installation."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rollgym.core.errors import MissingExtra
from rollgym.core.extras import install_command, require

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hint(tmp_path, monkeypatch):
    """The pip command of a rollgym in a separate folder, with a record of its installation source."""
    place = tmp_path / "site"
    core = place / "rollgym" / "core"
    core.mkdir(parents=True)
    (place / "rollgym" / "__init__.py").touch()
    for name in ("__init__.py", "errors.py", "extras.py"):
        shutil.copy(ROOT / "rollgym" / "core" / name, core / name)
    about = place / "rollgym-9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rollgym\nVersion: 9\n")

    def ask(origin=None, cwd=tmp_path):
        if origin is not None:
            (about / "direct_url.json").write_text(json.dumps(origin))
        code = "from rollgym.core.errors import MissingExtra; print(MissingExtra('It', 'train'))"
        run = [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {[str(place)]!r} + sys.path; {code}"]
        message = subprocess.run(run, capture_output=True, text=True, cwd=cwd, check=True).stdout.strip()
        return message.removeprefix("It needs the optional dependencies [train]: ")

    return ask


def make_clone(folder):
    (folder / "rollgym").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    return folder


def test_from_an_index_the_name_will_do(hint):
    assert hint() == "pip install 'rollgym[train]'"
    assert hint({"url": "https://example.org/rollgym-9.whl", "archive_info": {}}) == hint()


def test_from_a_clone_the_folder_is_named(hint, tmp_path):
    clone = make_clone(tmp_path / "my clone")
    origin = {"url": clone.as_uri(), "dir_info": {"editable": True}}
    assert hint(origin) == f"pip install -e '{clone}[train]'"
    assert hint(origin, cwd=clone) == "pip install -e '.[train]'"
    assert hint(origin | {"dir_info": {}}) == f"pip install '{clone}[train]'"
    shutil.rmtree(clone)
    assert hint(origin) == "pip install 'rollgym[train]'"


def test_from_git_the_address_is_named(hint):
    origin = {"url": "https://example.org/rollgym", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    assert hint(origin) == "pip install 'rollgym[train] @ git+https://example.org/rollgym@abc'"


def test_a_record_that_cannot_be_read_is_no_reason_to_fail(hint):
    assert hint([1]) == hint({"dir_info": {}}) == "pip install 'rollgym[train]'"


def test_what_is_not_installed_is_refused_without_importing_it():
    require("It", "json")
    with pytest.raises(
        MissingExtra, match=r"It needs the optional dependencies \[no_such_module\]: pip install"
    ):
        require("It", "no_such_module")
    assert "[train]'" in install_command("train")


def test_all_holds_every_extra_that_users_have():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    inside = extras["all"][0].removeprefix("rollgym[").removesuffix("]").split(",")
    # SGLang and vLLM pin their own torch and need separate environments; the other two are for developers.
    assert sorted(inside) == sorted(set(extras) - {"all", "dev", "docs", "sglang", "vllm"})
