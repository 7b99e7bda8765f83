"""What an environment or a model wrote is text, however it tries not to be."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from made_runs import failed_episode, make_episode

from rollgym.view import export

MakeRun = Callable[..., Path]
OpenPage = Callable[..., Any]


HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "\u202etxt.exe\u2066 bell\x07 esc\x1b[31m null\x00 \u200bzero"
)
SHOWN = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "⟦U+202E⟧txt.exe⟦U+2066⟧ bell␇ esc␛[31m null␀ ⟦U+200B⟧zero"
)


def test_hostile_text_is_shown_as_text(make_run: MakeRun, tmp_path: Path, open_page: OpenPage) -> None:
    turn = {
        "observation": HOSTILE, "action": HOSTILE, "response": HOSTILE + "!", "info": {HOSTILE: HOSTILE},
    }  # fmt: skip
    episodes = [make_episode(0, env=HOSTILE, turn=turn, instructions=HOSTILE), failed_episode(1, HOSTILE)]
    # The title is the folder's name, which is as hostile as a folder's name can be.
    name = "<script>document.title='owned'<script>"
    folder = make_run(episodes, name=name, manifest={"name": HOSTILE, "agent": {"name": HOSTILE}})
    page = open_page(export(folder, tmp_path / "page.html").path)
    page.wait_for_selector(".hero")
    assert SHOWN in page.inner_text(".message")
    for place in (
        "#episodes/0",
        "#episodes/0/group",
        "#episodes/0/raw",
        "#episodes/1",
        "#timeline",
        "#about",
    ):
        page.evaluate("place => { location.hash = place }", place)
        page.wait_for_timeout(100)
    page.evaluate("location.hash = '#episodes/0'")
    page.wait_for_selector(".turn pre.seen", state="visible")
    page.wait_for_selector(".turn pre.seen:not(:empty)")
    assert page.inner_text(".turn pre.seen") == SHOWN
    assert page.inner_text(".turn pre.said >> nth=0") == SHOWN
    page.click("summary:has-text('full response')")
    page.wait_for_selector(f"text={SHOWN[-10:]}!")
    assert page.title().startswith("<script>")
    assert "owned" not in page.title().replace("='owned'", "")
    assert page.locator("img").count() == 0
    assert page.evaluate("document.querySelectorAll('#app script').length") == 0


def test_a_megabyte_in_one_line_is_folded(make_run: MakeRun, tmp_path: Path, open_page: OpenPage) -> None:
    folder = make_run([make_episode(0, turn={"observation": "ab" * 500_000, "action": "x" * 100_000})])
    page = open_page(export(folder, tmp_path / "page.html").path, "#episodes/0")
    page.wait_for_selector(".turn")
    assert len(page.inner_text(".turn pre.seen")) < 3_200
    assert "of 200,056 characters" in page.inner_text(".turn pre.seen button")
    page.click(".turn pre.seen button")
    assert 53_000 <= len(page.inner_text(".turn pre.seen")) < 53_200
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
