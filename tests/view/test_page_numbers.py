"""The first page of runs made by hand: what it says, and that it leads to failures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from made_runs import failed_episode, line_of, make_episode

from rollgym.view import export

MakeRun = Callable[..., Path]
OpenPage = Callable[..., Any]


def test_training_curves_and_headline(make_run: MakeRun, tmp_path: Path, open_page: OpenPage) -> None:
    def told(step: int, phase: str, rate: float) -> dict[str, Any]:
        around = [max(0.0, rate - 0.1), min(1.0, rate + 0.1)]
        return {"step": step, "phase": phase, "env": "A-v0", "success_rate": rate, "success_ci": around}

    steps = [
        {"step": s, "return": s / 9, "entropy": 2 / s, "seconds_train": 1, "seconds_generate": s}
        for s in range(1, 10)
    ]
    folder = make_run(
        [line_of(make_episode(n, group="g", member=n), step=1) for n in range(4)],
        manifest={"kind": "train", "name": "my run"},
        evaluations=[told(0, "before", 0.1), told(9, "after", 0.7)],
        metrics=steps,
    )
    for scheme in ("light", "dark"):
        page = open_page(export(folder, tmp_path / "page.html").path, color_scheme=scheme)
        page.wait_for_selector(".hero")
        assert page.inner_text(".hero .big") == "10 % → 70 %"
        assert "clearly better" in page.inner_text(".hero")
        assert page.locator("svg.chart").count() == 4  # held-out success, return, entropy, time
        ink, paper = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        bright = sum(map(int, ink[4:-1].split(","))) > sum(map(int, paper[4:-1].split(",")))
        assert bright == (scheme == "dark")


def test_an_empty_run_and_one_with_damage_are_pages_too(
    make_run: MakeRun, tmp_path: Path, open_page: OpenPage
) -> None:
    page = open_page(export(make_run([]), tmp_path / "a.html").path)
    page.wait_for_selector("main >> text=No episode has ended yet.")
    for place, words in (("#episodes", "0 episodes"), ("#timeline", "No events were recorded")):
        page.evaluate("place => { location.hash = place }", place)
        page.wait_for_selector(f"text={words}")
    broken = make_run([b"{half\n", make_episode(0)], name="broken")
    page = open_page(export(broken, tmp_path / "b.html").path)
    page.wait_for_selector("main >> text=1 line of episodes.jsonl could not be read")


def test_a_failure_is_named_and_leads_to_its_episode(
    make_run: MakeRun, tmp_path: Path, open_page: OpenPage
) -> None:
    folder = make_run([make_episode(0), failed_episode(1, "the lock is jammed"), failed_episode(2, "no key")])
    page = open_page(export(folder, tmp_path / "page.html").path)
    page.click("tr:has-text('the lock is jammed') >> text=show")
    page.wait_for_selector(".failure")
    assert "ValueError" in page.inner_text(".failure")
    assert "the lock is jammed" in page.inner_text(".failure")


def test_on_a_telephone_the_list_fits_and_numbers_say_what_they_count(
    make_run: MakeRun, tmp_path: Path, open_page: OpenPage
) -> None:
    folder = make_run(
        [line_of(make_episode(n, group="g", member=n), step=1) for n in range(4)],
        manifest={"kind": "train", "name": "my run", "command": "rollgym train my_run"},
        metrics=[{"step": 1, "return": 1.0}],
    )
    page = open_page(export(folder, tmp_path / "page.html").path)
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    page.wait_for_selector(".hero")
    assert "rollgym train my_run" in page.inner_text("main")
    assert "episodes trained on" in page.inner_text(".cards")
    page.goto(page.url.partition("#")[0] + "#episodes")
    page.wait_for_selector(".rows .row")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.querySelector('.rows').scrollWidth") <= 390
    heads = [name.strip() for name in page.locator(".row.head button").all_inner_texts()]
    assert [name.split()[0] for name in heads if name] == ["✓", "episode", "step", "return", "turns"]
    page.set_viewport_size({"width": 1280, "height": 800})
    page.wait_for_selector(".row.head button >> nth=5")
