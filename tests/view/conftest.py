"""Runs to look at, and a browser to look with."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollgym.browser.find import find_chromium
from rollgym.core.errors import UsageError

sys.path.insert(0, str(Path(__file__).parent))

from made_runs import MANIFEST, line_of


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run's folder from episodes (or finished lines), metrics, evaluations and events."""

    def make(
        episodes: list[Any] = [],  # noqa: B006
        *,
        name: str = "run",
        manifest: dict[str, Any] | None = None,
        **lines: list[dict[str, Any]],
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps({**MANIFEST, **(manifest or {})}))
        written = [one if isinstance(one, bytes) else line_of(one) for one in episodes]
        (folder / "episodes.jsonl").write_bytes(b"".join(written))
        for kind, values in lines.items():
            text = "".join(json.dumps(value) + "\n" for value in values)
            (folder / f"{kind}.jsonl").write_text(text)
        return folder

    return make


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, the one that the shop's tests use; without one these tests are skipped."""
    try:
        program = find_chromium()
    except UsageError as error:
        pytest.skip(str(error))
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page; at the end nothing may have gone wrong in it."""
    pages, wrong = [], []

    def show(url: str | Path, hash_: str = "", **options: Any) -> Any:
        page = browser.new_page(viewport={"width": 1280, "height": 800}, **options)
        pages.append(page)
        page.set_default_timeout(20_000)
        page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on(
            "request", lambda request: wrong.append(f"asked for {request.url}") if foreign(request) else None
        )
        page.goto((url.as_uri() if isinstance(url, Path) else url) + hash_)
        page.wait_for_selector("header.top")
        return page

    yield show
    for page in pages:
        page.close()
    assert wrong == []


def foreign(request: Any) -> bool:
    """Whether a page asked for something that is neither itself nor its own server's."""
    return not request.url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:"))
