"""The exported page of a real evaluation in a real Chromium."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rollgym.evaluation.runner import Request, evaluate
from rollgym.view import export

MakeRun = Callable[..., Path]
OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def sokoban(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a real evaluation: twelve random games, three of each task."""
    folder = tmp_path_factory.mktemp("real")
    asked = Request(env_id="rollgym/Sokoban-v0", agent="random", episodes=12, per_task=3)
    with ThreadPoolExecutor(1) as thread:  # the browser has an event loop in this one
        thread.submit(evaluate, asked, folder / "run").result()
    return export(folder / "run", folder / "page.html").path


def test_a_real_run_is_told_at_a_glance(sokoban: Path, open_page: OpenPage) -> None:
    page = open_page(sokoban)
    page.wait_for_selector(".hero .big")
    assert page.inner_text(".hero .big").endswith("%")
    assert "of 12 episodes succeeded" in page.inner_text(".hero")
    assert page.locator("svg.chart").count() == 2
    assert "rollgym/Sokoban-v0" in page.inner_text("table")


def test_every_page_opens(sokoban: Path, open_page: OpenPage) -> None:
    page = open_page(sokoban)
    for name, what in (("Episodes", ".rows .row"), ("Timeline", "canvas.lanes"), ("Settings", "pre.text")):
        page.click(f"nav.main >> text={name}")
        page.wait_for_selector(what)
    assert '"kind": "eval"' in page.inner_text("main")


def test_an_episode_opens_with_its_board(sokoban: Path, open_page: OpenPage) -> None:
    page = open_page(sokoban, "#episodes")
    page.click(".rows .row >> nth=2")
    page.wait_for_selector(".turn svg.board")
    turns = page.locator("ol.turns > .turn").count()
    assert turns == page.locator("ol.turns svg.board").count() > 0
    assert page.locator(".turn svg.board >> nth=0").locator(".player").count() == 1
    page.click(".tabs >> text=Group (3)")
    page.wait_for_selector(".sibling:nth-child(3) ol.moves")
    page.click(".tabs >> text=Tokens")
    page.wait_for_selector(".episode >> text=No tokens were recorded")


def test_a_narrow_window_does_not_scroll_sideways(sokoban: Path, open_page: OpenPage) -> None:
    page = open_page(sokoban)
    page.set_viewport_size({"width": 420, "height": 800})
    for place in ("#overview", "#episodes/0", "#timeline", "#about"):
        page.evaluate("place => { location.hash = place }", place)
        page.wait_for_timeout(150)
        assert page.evaluate("document.documentElement.scrollWidth") <= 420, place


def test_the_page_holds_json_only_in_packed_form(sokoban: Path) -> None:
    text = sokoban.read_text()
    assert json.dumps("rollgym/Sokoban-v0") not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
