"""docs/architecture.md against the tree: packages, files of one training step, and import directions."""

import re
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

grimp: Any = pytest.importorskip("grimp")

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STEP = re.compile(
    r"<!-- files of one training step: begin -->\n(.*?)<!-- files of one training step: end -->", re.DOTALL
)


def layers() -> list[set[str]]:
    """The layers of the import-linter contract, from top to bottom."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if contract["type"] == "layers"]
    return [{name.strip() for name in layer.split("|")} for layer in contract["layers"]]


def packages_in_tree() -> set[str]:
    """Top-level packages, and those of the trainer."""
    top = {path.parent.name for path in (ROOT / "rollgym").glob("*/__init__.py")}
    inner = {path.parent.relative_to(ROOT / "trainer") for path in (ROOT / "trainer").glob("**/__init__.py")}
    trainer = {".".join(("trainer", *path.parts)) for path in inner}
    return {f"rollgym.{name}" for name in top | trainer}


def test_every_package_is_on_the_page_and_in_the_tree() -> None:
    shown = re.findall(r"^\|(?: \d+ \|)? `(rollgym\.[\w.]+)` \|", PAGE, re.MULTILINE)
    assert len(shown) == len(set(shown))
    modules = {f"rollgym.{path.stem}" for path in (ROOT / "rollgym").glob("[!_]*.py")}
    assert set(shown) == packages_in_tree() | modules


def test_the_page_shows_the_layers_of_the_contract() -> None:
    rows = re.findall(r"^\| (\d+) \| `rollgym\.(\w+)` \|", PAGE, re.MULTILINE)
    shown = [{name for number, name in rows if int(number) == layer + 1} for layer in range(len(layers()))]
    assert shown == layers()


def test_the_files_of_a_training_step_exist_and_are_at_most_35() -> None:
    match = STEP.search(PAGE)
    assert match is not None
    numbered = re.findall(r"^(\d+)\. `([\w/]+\.py)`: \S", match[1], re.MULTILINE)
    assert len(numbered) == len(match[1].strip().splitlines())
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    files = [file for _, file in numbered]
    assert len(files) == len(set(files))
    assert len(files) <= 35
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("parent", ["rollgym", "rollgym.trainer", "rollgym.engines"])
def test_no_import_cycle_between_packages(parent: str) -> None:
    graph = grimp.build_graph("rollgym")
    # Modules beside the packages of a parent may join them: only packages must not import each other.
    packages = {child for child in graph.find_children(parent) if graph.find_children(child)}
    imports: dict[str, set[str]] = {package: set() for package in packages}
    for package in packages:
        for module in {package, *graph.find_descendants(package)}:
            for imported in graph.find_modules_directly_imported_by(module):
                target = ".".join(imported.split(".")[: parent.count(".") + 2])
                if target in packages and target != package:
                    imports[package].add(target)
    assert len(imports) >= 2
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        raise AssertionError(f"import cycle: {' -> '.join(error.args[1])}") from error
