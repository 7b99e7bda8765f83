"""WebShop in a real browser: the same rewards, a closed network, and what happens when the browser dies."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollgym.check import check_env
from rollgym.envs.webshop import html
from rollgym.envs.webshop.browser import WebShopBrowserEnv
from rollgym.envs.webshop.browser.find import find_chromium
from rollgym.envs.webshop.browser.host import BrowserLost
from rollgym.envs.webshop.env import WebShopEnv
from rollgym.errors import EnvError, RunError, UsageError
from rollgym.failures import outcome_of
from rollgym.types import Outcome

try:
    find_chromium()
except UsageError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def env(synthetic_folder: str) -> Iterator[WebShopBrowserEnv]:
    made = WebShopBrowserEnv(synthetic_folder)
    yield made
    made.close()


def chromium_processes(of: int | None = None) -> set[int]:
    """The process ids of Chromium among the descendants of a process (this one)."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                names[int(entry.name)] = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
    found = {of or os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {
        pid for pid in found if b"--headless" in names.get(pid, b"") or b"chrom" in names.get(pid, b"")[:60]
    }


def browsers() -> set[int]:
    """The browsers themselves: not their children, nor the script that some systems start them by."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in chromium_processes()}
    return {
        pid
        for pid, line in lines.items()
        if b"--remote-debugging-pipe" in line and b"--type=" not in line and not line.startswith(b"/bin/sh")
    }


def wait_until_gone(pids: set[int]) -> None:
    for _ in range(200):
        if not pids & chromium_processes(1):
            return
        time.sleep(0.1)
    raise AssertionError(f"{pids & chromium_processes(1)} are still there")


def in_browser(text: WebShopEnv, action: str) -> str:
    """What to do in the browser for an action of the text environment: things stand in the same order."""
    name, _, argument = action[:-1].partition("[")
    if name == "search":
        return f"type[e1][{argument}]"
    element = text.page.find(argument)
    usable = [found for found in text.page.elements if found.key]
    return f"click[e{1 + next(n for n, found in enumerate(usable) if found is element)}]"


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
                here = text.step(action)
                info = here[4]
                assert here[1:4] == there[1:4], action
                for key in ("success", "valid", "purchased", "score", "page", "turns_left"):
                    assert here[4].get(key) == there[4].get(key), (action, key)
                assert browser.page == text.page
                for element in text.page.elements:
                    assert " ".join(element.text.split()) in there[0]
                over = here[2] or here[3]
            purchases += here[2]
            if here[2]:  # and the other way round: what was bought in the browser, bought in text
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
        found = re.search(rf'radiogroup "{name}".*?\[(e\d+)\] radio "{re.escape(value)}"', seen, re.DOTALL)
        assert found
        seen, *_ = env.step(f"click[{found[1]}]")
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
    text = WebShopEnv(str(env.shop.catalogue.folder))
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


def test_a_page_that_is_not_the_shops_is_a_lost_browser(synthetic_folder: str) -> None:
    env = WebShopBrowserEnv(synthetic_folder)
    try:
        env.reset(seed=0)
        with pytest.raises(BrowserLost, match="no page of the visit"):
            env._arrive(env._tree, "/elsewhere/x/0")
        assert env.reset(seed=0)[1]["page"] == "search"
    finally:
        env.close()


def test_a_failure_of_the_shop_is_no_observation(
    env: WebShopBrowserEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.reset(seed=0)

    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("rollgym.envs.webshop.server.visits.act", fail)
    with pytest.raises(EnvError, match="the shop answered 500"):
        env.step("type[e1][shirt]")
    monkeypatch.undo()
    assert env.reset(seed=0)[1]["page"] == "search"


def test_a_killed_browser_is_a_typed_outcome_and_the_next_episode_has_a_new_one(
    synthetic_folder: str,
) -> None:
    one, other = WebShopBrowserEnv(synthetic_folder), WebShopBrowserEnv(synthetic_folder)
    try:
        first, _ = one.reset(seed=0)
        other.reset(seed=1)
        before = browsers()
        assert before
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(BrowserLost, match="the browser was lost") as lost:
            one.step("type[e1][shirt]")
        assert outcome_of(lost.value) is Outcome.WORKER_LOST
        with pytest.raises(BrowserLost):
            one.step("type[e1][shirt]")
        assert one.reset(seed=0)[0] == first
        assert one.step("type[e1][shirt]")[4]["page"] == "results"
        with pytest.raises(BrowserLost):
            other.step("type[e1][shirt]")
        other.reset(seed=1)
        after = browsers()
        assert len(after) == 1  # one browser for both again
        assert not after & before
    finally:
        one.close()
        other.close()


def test_the_style_of_a_page_says_nothing() -> None:
    # What it said would be in the tree, or not, by when the style sheet was there.
    style = (Path(html.__file__).parent / "templates" / "shop.css").read_text()
    assert set(re.findall(r"content: ([^;]*);", style)) <= {'""'}


@pytest.mark.slow
def test_a_browser_that_does_not_answer_is_lost_and_ended(
    synthetic_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollgym.envs.webshop.browser.tab.SECONDS", 3.0)
    env = WebShopBrowserEnv(synthetic_folder)
    try:
        env.reset(seed=0)
        stopped = chromium_processes()
        for pid in browsers():
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(BrowserLost, match="Timeout"):
            env.step("type[e1][shirt]")
        assert env.reset(seed=0)[1]["page"] == "search"
        wait_until_gone(stopped)
    finally:
        env.close()


@pytest.mark.slow
def test_a_browser_makes_way_for_a_new_one_after_many_episodes(
    synthetic_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollgym.envs.webshop.browser.host.LINGER", 0.0)
    one, other = WebShopBrowserEnv(synthetic_folder), WebShopBrowserEnv(synthetic_folder)
    try:
        one.reset(seed=0)
        other.reset(seed=0)
        first = browsers()
        monkeypatch.setattr("rollgym.envs.webshop.browser.host.MAX_TABS", 2)
        one.reset(seed=1)
        second = browsers() - first
        assert len(second) == 1
        assert other.step("type[e1][shirt]")[4]["page"] == "results"  # its episode goes on
        other.reset(seed=1)
        wait_until_gone(first)
        assert browsers() == second
    finally:
        one.close()
        other.close()


def test_closing_leaves_no_process(synthetic_folder: str) -> None:
    code = f"""
import sys
from rollgym.envs.webshop.browser import WebShopBrowserEnv
envs = [WebShopBrowserEnv({synthetic_folder!r}) for _ in range(2)]
for env in envs:
    env.reset(seed=0)
    env.step("type[e1][shirt]")
print("open", flush=True)
sys.stdin.readline()
envs[0].close()
envs[0].close()
del envs, env
print("closed", flush=True)
sys.stdin.readline()
env = WebShopBrowserEnv({synthetic_folder!r})
env.reset(seed=0)
print("again", flush=True)
sys.stdin.readline()
"""
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "open\n"
        running = chromium_processes(child.pid)
        assert running
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "closed\n"
        wait_until_gone(running)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "again\n"
        running = chromium_processes(child.pid)
        assert running
        out, err = child.communicate("\n", timeout=60)
        assert (child.returncode, out, err) == (0, "", "")
        assert not running & chromium_processes(1)
    finally:
        child.kill()
        child.communicate()


def test_it_works_in_the_threads_of_a_pool(synthetic_folder: str) -> None:
    from rollgym.pool.local import LocalPool
    from rollgym.types import EpisodeSpec

    mine = chromium_processes()

    async def play() -> tuple[list[str], set[int]]:
        pool = LocalPool(workers=1)
        try:
            specs = [
                EpisodeSpec(
                    episode_id=f"e{number}",
                    env_id="rollgym/WebShopBrowser-v0",
                    env_kwargs={"shop": synthetic_folder},
                    task=number,
                )
                for number in range(2)
            ]
            sessions = [await pool.open(spec) for spec in specs]
            await asyncio.gather(*(session.reset() for session in sessions))
            steps = await asyncio.gather(*(session.step("type[e1][shirt]") for session in sessions))
            running = chromium_processes() - mine
            for session in sessions:
                await session.close()
        finally:
            await pool.close()
        return [step.info["page"] for step in steps], running

    pages, running = asyncio.run(play())
    assert pages == ["results", "results"]
    assert running
    wait_until_gone(running)


def test_what_does_not_start_is_said(synthetic_folder: str, tmp_path: Path) -> None:
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    broken.chmod(0o755)
    env = WebShopBrowserEnv(synthetic_folder, chromium=str(broken))
    with pytest.raises(
        RunError, match=r"chromium\) does not start: .*\(no such luck\).*apt install chromium-headless-shell"
    ):
        env.reset(seed=0)
    env.close()


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
    report = check_env(
        "rollgym/WebShopBrowser-v0",
        kwargs={"shop": synthetic_folder, "max_turns": 200},
        rules=rules,
        quick=True,
    )
    assert {result.status for result in report.results} == {"passed"}, report.to_json()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_keeps_the_contract(synthetic_folder: str) -> None:
    report = check_env("rollgym/WebShopBrowser-v0", kwargs={"shop": synthetic_folder}, quick=True)
    assert report.ok, report.to_json()
