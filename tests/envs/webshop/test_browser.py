"""WebShop in a real browser: the same rewards as in text, pages as an agent sees them, a closed network."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from rollgym.browser.find import find_chromium
from rollgym.checks import check
from rollgym.core.errors import EnvError, UsageError
from rollgym.envs.webshop import html
from rollgym.envs.webshop.browser import WebShopBrowserEnv
from rollgym.envs.webshop.env import WebShopEnv

try:
    find_chromium()
except UsageError as error:
    pytest.skip(str(error), allow_module_level=True)

REFUSED = {
    "": "an action is",
    "click[]": "an action is",
    "click[buy now]": "an action is",
    "search[mug]": "an action is",
    "click[e9]": "there is no [e9]",
    "click[e1]": "[e1] is a field",
    "type[e2][mug]": "there is no field [e2]",
    "type[e1][ \n ]": "a search has words",
    f"type[e1][{'x' * 1001}]": "a search has words",
}


@pytest.fixture(scope="module")
def env(synthetic_folder: str) -> Iterator[WebShopBrowserEnv]:
    browser_env = WebShopBrowserEnv(synthetic_folder)
    yield browser_env
    browser_env.close()


def in_browser(text: WebShopEnv, action: str) -> str:
    """What to do in the browser for an action of the text environment: things stand in the same order."""
    name, _, argument = action[:-1].partition("[")
    if name == "search":
        return f"type[e1][{argument}]"
    element = text.page.find(argument)
    usable = [item for item in text.page.elements if item.key]
    return f"click[e{1 + next(n for n, item in enumerate(usable) if item is element)}]"


def shopper(env: WebShopEnv, info: dict[str, Any], rng: np.random.Generator) -> str:
    """Random actions that often buy."""
    if "buy now" in info["clickables"] and rng.random() < 0.4:
        return "click[buy now]"
    return env.random_action("", info, rng)


def drive_both_ways(folder: str, episodes: int, rules: str) -> int:
    """Play random episodes in both, and count the purchases."""
    text, browser = WebShopEnv(folder, rules=rules), WebShopBrowserEnv(folder, rules=rules)
    rng, purchases = np.random.default_rng(7), 0
    assert text.tasks.name == browser.tasks.name
    try:
        for episode in range(episodes):
            _, info = text.reset(seed=episode)
            browser.reset(seed=episode)
            assert text.goal == browser.goal
            over = False
            while not over:
                action = shopper(text, info, rng)
                there = browser.step(in_browser(text, action))
                result = text.step(action)
                info = result[4]
                assert result[1:4] == there[1:4], action
                for key in ("success", "valid", "purchased", "score", "page", "turns_left"):
                    assert result[4].get(key) == there[4].get(key), (action, key)
                assert browser.page == text.page
                for element in text.page.elements:
                    assert " ".join(element.text.split()) in there[0]
                over = result[2] or result[3]
            purchases += result[2]
            if result[2]:  # and the other way round: what was bought in the browser, bought in text
                assert buy_again(text, episode, there[4]["purchased"]) == there[1]
    finally:
        browser.close()
    return purchases


def buy_again(text: WebShopEnv, seed: int, bought: dict[str, Any]) -> float:
    text.reset(seed=seed)
    text.step(f"search[{text.shop.by_asin(bought['asin']).title}]")
    while bought["asin"].lower() not in text.page.clickables:
        text.step("click[next >]")
    text.step(f"click[{bought['asin'].lower()}]")
    for name, value in bought["options"].items():
        clean = f"{name}: {value}" if not text.shop.rules.clashing_values else value
        assert text.step(f"click[{clean}]")[4]["valid"]
    return text.step("click[buy now]")[1]


@pytest.mark.parametrize(("rules", "episodes"), [("clean", 3), ("original", 2)])
def test_browser_and_text_give_the_same_rewards(synthetic_folder: str, rules: str, episodes: int) -> None:
    assert drive_both_ways(synthetic_folder, episodes, rules) >= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rules", ["clean", "original"])
def test_browser_and_text_give_the_same_rewards_100_times(synthetic_folder: str, rules: str) -> None:
    assert drive_both_ways(synthetic_folder, 100, rules) >= 50


def test_an_episode_as_an_agent_sees_it(env: WebShopBrowserEnv) -> None:
    seen, info = env.reset(seed=0, options={"task": 0})
    assert seen.splitlines() == [
        "WebShop",
        "Instruction:",
        " ".join(env.goal.instruction.split()),
        '[e1] searchbox "What are you looking for?"',
        '[e2] button "Search"',
    ]
    assert info["actions"] == ["type[e1][your words]"]
    title = env.shop.by_asin(env.goal.asin).title
    seen, reward, *_, info = env.step(f"Type[e1] [{title}]")
    assert f'link "{env.goal.asin}"\n' in seen
    link = re.search(rf'\[(e\d+)\] link "{env.goal.asin}"', seen)
    assert link
    assert info["actions"][-1] == "back"
    seen, *_ = env.step(f" `click[ {link[1]} ]` ")
    for name, value in dict(env.goal.options).items():
        match = re.search(rf'radiogroup "{name}".*?\[(e\d+)\] radio "{re.escape(value)}"', seen, re.DOTALL)
        assert match
        seen, *_ = env.step(f"click[{match[1]}]")
        assert f'radio "{value}" (checked)' in seen
    buy = re.search(r'\[(e\d+)\] button "Buy Now"', seen)
    assert buy
    seen, reward, terminated, truncated, info = env.step(f"click[{buy[1]}]")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    assert info["purchased"] == {"asin": env.goal.asin, "options": dict(env.goal.options)}
    assert seen.startswith("Thank you for shopping with us!")
    assert "score" not in seen.lower()
    assert info["actions"] == ["back"]


def test_the_way_back_leads_to_the_page_as_it_was(env: WebShopBrowserEnv) -> None:
    seen, _ = env.reset(seed=0, options={"task": 1})
    assert env.step("back")[4]["valid"] is False
    pages = [seen]
    pages += [env.step(action)[0] for action in ("type[e1][shirt]", "click[e3]", "click[e1]")]
    assert pages[0] == pages[3]
    for page in reversed(pages[:3]):
        seen, reward, _, _, info = env.step("BACK")
        assert (seen, reward, info["valid"]) == (page, 0.0, True)
    # A new way from there, and back again.
    other = env.step("type[e1][red shoes]")[0]
    assert other != pages[1]
    assert env.step("back")[0] == pages[0]
    assert "back" not in env.step("click[e77]")[4]["actions"]


def test_what_is_not_possible_is_said_and_changes_nothing(env: WebShopBrowserEnv) -> None:
    first, before = env.reset(seed=0, options={"task": 0})
    for turn, (action, why) in enumerate(REFUSED.items(), 1):
        seen, reward, terminated, truncated, info = env.step(action)
        assert seen.startswith(f"Not possible: {why}"), action
        assert seen.endswith(f".\n{first}")
        assert (reward, terminated, truncated, info["valid"]) == (0.0, False, False, False)
        assert info["actions"] == before["actions"]
        assert info["turns_left"] == before["turns_left"] - turn


def test_any_words_can_be_typed(env: WebShopBrowserEnv) -> None:
    text = WebShopEnv(str(env.shop.catalog.folder))
    for words in ('Red   [xl] "shirt">]', "naïve 向上 🙂 <b>&amp;</b>", "a\x00b\nc\u2028d"):
        env.reset(seed=0, options={"task": 0})
        text.reset(seed=0, options={"task": 0})
        env.step(f"type[e1][{words}]")
        text.step(f"search[{words}]")
        if "\x00" not in words:
            assert env.page == text.page
        assert env.page.kind == "results"


def test_the_network_is_closed(env: WebShopBrowserEnv) -> None:
    from playwright.async_api import Error

    env.reset(seed=0)
    tab = env._seat.tab
    assert tab is not None
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        places = [
            "http://example.com/",
            "http://192.0.2.1/",
            f"http://127.0.0.1:{other.getsockname()[1]}/",
            "file:///etc/passwd",
        ]

        async def visit(address: str) -> str:
            assert tab is not None
            try:
                await tab.page.goto(address)
            except Error as error:
                return str(error)
            return "it was shown"

        for place in places:
            said = env._seat.call(lambda place=place: visit(place))
            assert "net::ERR" in said, (place, said)
        assert tab.blocked[:3] == places[:3]
        with pytest.raises(BlockingIOError):
            other.accept()
    # Where the page has gone is noticed, and is nobody's reward.
    env.reset(seed=0)


def test_a_failure_of_the_shop_is_no_observation(
    env: WebShopBrowserEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.reset(seed=0)

    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("rollgym.envs.webshop.server.sessions.act", fail)
    with pytest.raises(EnvError, match="the shop answered 500"):
        env.step("type[e1][shirt]")
    monkeypatch.undo()
    assert env.reset(seed=0)[1]["page"] == "search"


def test_the_style_of_a_page_says_nothing() -> None:
    # What it said would be in the tree, or not, by when the style sheet was there.
    style = (Path(html.__file__).parent / "templates" / "shop.css").read_text()
    assert set(re.findall(r"content: ([^;]*);", style)) <= {'""'}


def test_wrong_arguments_are_said(synthetic_folder: str) -> None:
    for wrong in (
        {"rules": "orignal"},
        {"max_turns": 0},
        {"chromium": "/no/such/program"},
        {"goals": "human"},
    ):
        with pytest.raises(UsageError):
            WebShopBrowserEnv(synthetic_folder, **wrong)


def test_a_screenshot_is_a_picture(env: WebShopBrowserEnv) -> None:
    env.reset(seed=0)
    assert env.screenshot().startswith(b"\x89PNG")


def test_it_keeps_the_contract_in_what_is_quickly_checked(synthetic_folder: str) -> None:
    rules = ["runs", "before-reset", "instructions", "nonsense"]
    report = check(
        "rollgym/WebShopBrowser-v0",
        kwargs={"shop": synthetic_folder, "max_turns": 200},
        rules=rules,
        quick=True,
    )
    assert {result.status for result in report.results} == {"passed"}, report.to_json()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_keeps_the_contract(synthetic_folder: str) -> None:
    report = check("rollgym/WebShopBrowser-v0", kwargs={"shop": synthetic_folder}, quick=True)
    assert report.ok, report.to_json()


def test_addresses_of_visits_are_remembered_nowhere(env: WebShopBrowserEnv) -> None:
    env.reset(seed=0)
    env.step("type[e1][shirt]")
    known = urlsplit.cache_info().misses
    for seed in range(2):
        env.reset(seed=seed)
        env.step("type[e1][shirt]")
    assert urlsplit.cache_info().misses == known
