"""The site: every page is in the navigation, and it builds without a warning."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

yaml: Any = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def pages_of(nav: Any) -> Iterator[str]:
    """The pages of a navigation, however deep."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


def test_links_name_files_so_that_the_site_works_from_a_disk() -> None:
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["use_directory_urls"] is False


def test_every_page_is_in_the_navigation_once() -> None:
    shown = sorted(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert shown == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_reference_names_modules_that_exist() -> None:
    named = [
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    ]
    assert len(named) > 20
    for name in named:
        place = ROOT / Path(*name.split("."))
        assert place.with_suffix(".py").is_file() or (place / "__init__.py").is_file(), name


def test_the_picture_of_the_training_is_readable_in_the_dark() -> None:
    text = (DOCS / "images" / "training.svg").read_text()
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    for name in set(re.findall(r"^  ([.#]?[\w-]+(?: path)?) \{[^}]*(?:fill|stroke): #", light, re.MULTILINE)):
        assert f" {name} {{" in dark, name


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the docs extra is not installed")
    pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    built = subprocess.run(build, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "begin" in (tmp_path / "site/reference/environments.html").read_text()
    # From a disk there is no server that would give index.html for a folder: links name files.
    pages = [page for page in (tmp_path / "site").rglob("*.html") if page.name != "404.html"]
    links = [
        (page, link) for page in pages for link in re.findall(r'href="([^"#?:]+)["#?]', page.read_text())
    ]
    assert len(links) > 1_000
    lost = {f"{page.name}: {link}" for page, link in links if not (page.parent / unquote(link)).is_file()}
    assert lost == set()
