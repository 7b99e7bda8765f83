"""The folders on disk, the symlinks, pyproject.toml and the built package tell one story."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import rollgym

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
MAPPED = SETUPTOOLS["package-dir"]
HEAVY = {"torch", "ray", "transformers", "sglang", "deepspeed"}


def packages_on_disk() -> set[str]:
    found = {"rollgym"}
    for package, folder in {"rollgym": "rollgym", **MAPPED}.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            if not (package == "rollgym" and parts and f"rollgym.{parts[0]}" in MAPPED):
                found.add(".".join((package, *parts)))
    return found


def test_every_package_is_listed() -> None:
    assert set(SETUPTOOLS["packages"]) == packages_on_disk()


@pytest.mark.parametrize(("package", "folder"), MAPPED.items())
def test_symlink_points_at_the_top_level_folder(package: str, folder: str) -> None:
    link = ROOT / package.replace(".", "/")
    assert link.is_symlink(), f"{link} is not a symlink (is git core.symlinks off?)"
    assert link.resolve() == (ROOT / folder).resolve()


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["project"]["version"] == rollgym.__version__


def test_the_core_depends_on_nothing_heavy() -> None:
    names = {line.split(">")[0].split("=")[0].lower() for line in PROJECT["project"]["dependencies"]}
    assert not names & HEAVY


def test_the_wheel_holds_every_module_and_data_file(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(ROOT),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {"rollgym", "rollgym_verifiers.py", f"rollgym-{rollgym.__version__}.dist-info"}
    assert {name.split("/")[0] for name in names} == tops
    wanted = {"rollgym/py.typed", "rollgym/templates/new_env/env.py.txt", "rollgym/envs/wordle/words.txt"}
    for folder, package in [("rollgym", "rollgym"), *((f, p) for p, f in MAPPED.items())]:
        wanted |= {
            f"{package.replace('.', '/')}/{file.relative_to(ROOT / folder)}"
            for file in (ROOT / folder).rglob("*.py")
            if "__pycache__" not in file.parts
        }
    assert wanted <= names, sorted(wanted - names)
