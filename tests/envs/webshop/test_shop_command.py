"""``rollgym shop``: what it prints, and what it says about mistakes."""

import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_shop import raw, two_cups, write_original

from rollgym.core.extras import install_command

Command = Callable[..., Any]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLGYM_CACHE", str(tmp_path / "cache"))


def test_build_makes_a_shop_and_says_where(rollgym_command: Command, tmp_path: Path) -> None:
    ran = rollgym_command("shop", "build", "--size", 20, "--seed", 3, "--json")
    assert (ran.code, ran.err) == (0, "")
    shop = json.loads(ran.out)
    assert (shop["name"], shop["kind"], shop["seed"], shop["products"]) == (
        "synthetic:20:3",
        "synthetic",
        3,
        20,
    )
    assert Path(shop["folder"]).parent == tmp_path / "cache" / "shop"
    assert sum(shop["goals"]["synthetic"]["original"].values()) == shop["goals"]["synthetic"]["count"]
    ran_info = rollgym_command("shop", "info", "synthetic:20:3")
    assert "synthetic:20:3 (synthetic, seed 3)" in ran_info.out
    assert shop["fingerprint"] in ran_info.out
    assert json.loads(rollgym_command("shop", "info", "synthetic:20:3", "--json").out) == {
        **shop,
        "verified": None,
    }


def test_build_into_a_folder(rollgym_command: Command, tmp_path: Path) -> None:
    shop = json.loads(
        rollgym_command("shop", "build", "--size", 5, "--style", "simple", "--out", "mine", "--json").out
    )
    assert (shop["folder"], shop["name"]) == (str(tmp_path / "mine"), "simple:5")
    ran = rollgym_command("shop", "info", "mine", "--verify")
    assert ran.code == 0
    assert "files have the hash they were built with" in ran.out


def test_a_damaged_file_is_found(rollgym_command: Command, tmp_path: Path) -> None:
    rollgym_command("shop", "build", "--size", 5, "--out", "mine")
    path = tmp_path / "mine" / "products.blob"
    path.write_bytes(path.read_bytes()[:-1] + b"\xc1")
    assert rollgym_command("shop", "info", "mine").code == 0
    ran = rollgym_command("shop", "info", "mine", "--verify")
    assert (ran.code, ran.out) == (2, "")
    assert (
        "products.blob does not match its hash. Remove it and build it again: rollgym shop build." in ran.err
    )


def test_import_shows_what_was_left_out(rollgym_command: Command, tmp_path: Path) -> None:
    items = [raw("B1"), raw("B1"), raw("B2", pricing="soon")]
    write_original(tmp_path / "data", items, {"B1": {"attributes": ["blue"]}})
    ran = rollgym_command("shop", "import", "data", "--name", "mine")
    assert ran.code == 0
    assert "mine (imported, seed 0)" in ran.out
    assert "1 bad, 1 seen before" in ran.out
    assert "items_shuffle.json, record 2 (B2): pricing 'soon' holds no price" in ran.out
    shop = json.loads(rollgym_command("shop", "import", "data", "--json").out)
    assert (shop["name"], shop["products"], len(shop["bad_records"])) == ("webshop", 1, 1)
    strict = rollgym_command("shop", "import", "data", "--strict")
    assert (strict.code, len(strict.err.splitlines())) == (2, 1)


def test_an_import_can_be_looked_at(rollgym_command: Command, tmp_path: Path) -> None:
    two_cups(tmp_path / "data")
    assert rollgym_command("shop", "import", "data", "--name", "cups", "--goals", "both").code == 0
    ran = rollgym_command("shop", "info", "cups", "--verify")
    assert "human goals" in ran.out
    assert "light-1" in ran.out


MISTAKES = [
    ("info sinthetic", "Did you mean synthetic"),
    ("info synthetic:x", "use synthetic:SIZE"),
    ("info ./nowhere", "Shop folder not found: nowhere"),
    ("info .", "it has no manifest.json"),
    ("build --size 0", "from 1 to 10,000,000 products"),
    ("build --seed -1", "0 or more"),
    ("build --style smple", "Did you mean simple"),
    ("build --size many", "Invalid value for '--size'"),
    ("import nowhere", "Folder not found: nowhere"),
    ("import .", "holds no items_shuffle"),
    ("serve nowhere", "There is no shop called 'nowhere'"),
    ("serve --port 70000", "--port must be from 0 to 65535"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_a_mistake_is_a_sentence(rollgym_command: Command, words: str, said: str) -> None:
    ran = rollgym_command("shop", *words.split())
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.parametrize("name", ["build", "info", "import", "serve"])
def test_help_has_an_example(rollgym_command: Command, name: str) -> None:
    ran = rollgym_command("shop", name, "--help")
    assert ran.code == 0
    assert f"Example: rollgym shop {name}" in " ".join(ran.out.split())


def test_serve_hands_the_folder_to_the_server(
    rollgym_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    server = types.ModuleType("rollgym.envs.webshop.server")
    server.serve = lambda *args: asked.append(args)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rollgym.envs.webshop.server", server)
    assert rollgym_command("shop", "serve", "synthetic:5", "--port", 1234).code == 0
    ((folder, *rest),) = asked
    assert rest == ["127.0.0.1", 1234, "clean"]
    assert folder.parent == tmp_path / "cache" / "shop"


def test_a_missing_package_names_the_extra(rollgym_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tantivy", None)
    ran = rollgym_command("shop", "build", "--size", 5)
    assert ran.code == 2
    assert install_command("webshop") in ran.err


def test_the_command_line_starts_without_the_shop() -> None:
    code = "import sys, rollgym.cli; print([name for name in sys.modules if 'webshop' in name])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
