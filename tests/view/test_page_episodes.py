"""The list of episodes, one of them, and its tokens, in a real Chromium."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import failed_episode, line_of, make_episode
from role_episodes import FIRST, SECOND, game, turn

from rollgym.core.types import Outcome
from rollgym.view import export

MakeRun = Callable[..., Path]
OpenPage = Callable[..., Any]


def test_filters_and_sorting(make_run: MakeRun, tmp_path: Path, open_page: OpenPage) -> None:
    episodes = [make_episode(n, seconds=float(n)) for n in range(30)]
    episodes += [make_episode(30, env="Other-v0"), failed_episode(31, "the lock is jammed")]
    page = open_page(export(make_run(episodes), tmp_path / "page.html").path, "#episodes")
    page.wait_for_selector(".rows .row")
    assert page.inner_text(".count") == "32 episodes"
    page.select_option("[aria-label=success]", "true")
    assert page.inner_text(".count") == "11 of 32 episodes"
    page.select_option("[aria-label=success]", "")
    page.select_option("[aria-label=environment]", "Other-v0")
    assert page.inner_text(".count") == "1 of 32 episodes"
    page.select_option("[aria-label=environment]", "")
    page.select_option("[aria-label=outcome]", "env_error")
    assert page.locator(".rows .row").count() == 1
    page.select_option("[aria-label=outcome]", "")
    page.fill("[aria-label=search]", "JAMMED")
    assert page.locator(".rows .row .id").all_inner_texts() == ["e31"]
    page.fill("[aria-label=search]", "")
    page.click(".head [data-key=seconds]")
    assert page.locator(".rows .row .id >> nth=0").inner_text() == "e29"
    page.click(".head [data-key=seconds]")
    assert page.locator(".rows .row .id >> nth=0").inner_text() == "e0"


def alpha(color: str) -> tuple[list[int], float]:
    """An rgba() color as the browser gives it back."""
    *parts, last = color.removeprefix("rgba(").removesuffix(")").split(",")
    return [int(part) for part in parts], float(last)


def test_token_colours_match_what_is_stored(make_run: MakeRun, tmp_path: Path, open_page: OpenPage) -> None:
    logprobs, ratios, advantages = (-0.5, -2.5, -9.0), [1.25, 0.8, 1.0], [1.0, -0.5, 0.0]
    tokens = {
        "prompt_ids": (11, 12),
        "action_ids": (13, 14, 15),
        "logprobs": logprobs,
        "version_spans": ((4, 2), (5, 1)),
        "policy_version": 4,
    }
    line = line_of(make_episode(0, turn=tokens), step=1, tokens={"ratios": ratios, "advantages": advantages})
    page = open_page(export(make_run([line]), tmp_path / "page.html").path, "#episodes/0/tokens")
    page.wait_for_selector(".token")
    assert page.locator(".token").all_inner_texts() == ["11", "12", "13", "14", "15"]

    def colors(mode: str) -> list[Any]:
        page.click(f"[data-mode={mode}]")
        found = page.eval_on_selector_all(".token", "all => all.map(one => one.style.backgroundColor)")
        assert found[:2] == ["", ""]  # the environment's tokens have no color in any mode
        return [alpha(color) for color in found[2:]]

    orange, blue, green = [213, 94, 0], [0, 114, 178], [0, 158, 115]
    for (color, strength), logprob in zip(colors("logprob"), logprobs, strict=True):
        assert color == orange
        assert strength == pytest.approx(0.7 * min(1, (-logprob / 5) ** 0.5), abs=0.002)
    ratio = colors("ratio")
    assert [color for color, _ in ratio] == [orange, blue, orange]
    assert ratio[0][1] == pytest.approx(ratio[1][1], abs=0.002)  # 1.25 and 0.8 are as far from 1
    assert ratio[2][1] == 0
    assert colors("advantage") == [(green, pytest.approx(0.7)), (orange, pytest.approx(0.35)), (green, 0)]
    assert colors("mask") == [(blue, pytest.approx(0.35))] * 3
    first, second, third = colors("version")
    assert first == second != third
    page.hover(".token >> nth=3")
    words = page.inner_text(".tip.on")
    for said in (
        "id 14",
        "log-prob -2.5000 (8.21 %)",
        "ratio 0.8000",
        "advantage -0.5000",
        "policy version 4",
    ):
        assert said in words


def test_code_is_highlighted_and_a_shop_page_has_buttons(
    make_run: MakeRun, tmp_path: Path, open_page: OpenPage
) -> None:
    program = "```python\ndef add(a, b):\n    return a + b  # both\n```"
    page_text = "Instruction: [SEP] a red shoe [SEP] Back to Search [SEP] B01 [SEP] $9.50"
    shop = make_episode(
        1,
        env="rollgym/WebShop-v0",
        turn={"observation": page_text},
        reset_info={"clickables": ["back to search", "b01"]},
    )
    folder = make_run([make_episode(0, env="rollgym/Code-v0", turn={"action": program}), shop])
    page = open_page(export(folder, tmp_path / "page.html").path, "#episodes/0")
    page.wait_for_selector("pre.code")
    assert page.locator("pre.code .py-word").all_inner_texts() == ["def", "return"]
    assert page.inner_text("pre.code .py-comment") == "# both"
    page.evaluate("location.hash = '#episodes/1'")
    page.wait_for_selector(".shop")
    # Turns outside of the window are not laid out, and have no inner text.
    page.locator(".shop").scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('.shop .price').innerText")
    assert page.locator(".shop .chip").all_inner_texts() == ["Back to Search", "B01"]
    assert page.inner_text(".shop .price") == "$9.50"


def test_an_episode_that_never_began_is_shown(make_run: MakeRun, tmp_path: Path, open_page: OpenPage) -> None:
    lost = make_episode(0, outcome=Outcome.WORKER_LOST, turns=(), success=None)
    page = open_page(export(make_run([lost]), tmp_path / "page.html").path, "#episodes/0")
    page.wait_for_selector("text=No turns.")


def test_turns_show_their_role(make_run: MakeRun, tmp_path: Path, open_page: OpenPage) -> None:
    turns = [turn(FIRST), turn(SECOND, first=-1, second=1)]
    players = {FIRST: "policy", SECOND: "past"}
    page = open_page(
        export(make_run([game(0, turns, players=players)]), tmp_path / "p.html").path, "#episodes/0"
    )
    page.wait_for_selector(".turns .turn")
    assert page.locator(".turn-head .role").all_inner_texts() == [FIRST, SECOND]
    assert page.locator(".turn-head .reward").all_inner_texts() == [
        "reward player_1 0, player_2 0",
        "reward player_1 −1, player_2 1",
    ]
    facts = page.inner_text(".facts")
    assert "policy, return −1" in facts
    assert "past, return 1" in facts
    assert page.locator("summary").all_inner_texts()[:2] == [
        "instructions of player_1",
        "instructions of player_2",
    ]
