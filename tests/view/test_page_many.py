"""Very many episodes: the list holds only what is in sight."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from made_runs import make_episode

from rollgym.view import export

MakeRun = Callable[..., Path]
OpenPage = Callable[..., Any]


def test_five_thousand_episodes_keep_the_list_short(
    make_run: MakeRun, tmp_path: Path, open_page: OpenPage
) -> None:
    folder = make_run([make_episode(n, group=f"g{n // 8}", member=n % 8) for n in range(5_000)])
    page = open_page(export(folder, tmp_path / "page.html").path, "#episodes")
    page.wait_for_selector(".rows .row")
    assert page.inner_text(".count") == "5,000 episodes"
    assert page.locator(".rows .row").count() < 60
    page.eval_on_selector(".rows", "box => { box.scrollTop = box.scrollHeight }")
    page.wait_for_selector(".rows .row:has-text('e4999')")
    assert page.locator(".rows .row").count() < 60
    page.click(".rows .row:has-text('e4999')")
    page.wait_for_selector(".episode h2:has-text('e4999')")
    page.fill("[aria-label=search]", "e49")
    assert page.inner_text(".count") == "111 of 5,000 episodes"
