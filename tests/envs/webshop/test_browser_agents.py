"""The rule and the oracle in the browser: what they read off a page, and that they play as in text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollgym.core.agent import AgentSetup, Briefing
from rollgym.core.errors import UsageError
from rollgym.core.types import EpisodeSpec
from rollgym.envs.webshop.env import WebShopEnv
from rollgym.envs.webshop.oracle import Oracle
from rollgym.envs.webshop.rule_agent import RuleAgent

pytest.importorskip("playwright")
pytest.importorskip("starlette")

from rollgym.envs.webshop.browser import WebShopBrowserEnv
from rollgym.envs.webshop.browser.agents import BrowserOracle, BrowserRule, read_page

ID = "rollgym/WebShopBrowser-v0"
SETUP = AgentSetup(env_id=ID, env_kwargs={"reveal": True})
ITEM = """\
Instruction: a lamp, [e9] of color: red
[e1] button "Back to Search"
radiogroup "color"
  color (chosen: red)
  [e2] radio "red" (checked)
  [e3] radio "5" wide, "deep""
radiogroup "size"
  [e4] radio "red"
Price: $5
[e5] button "Buy Now"
"""


@pytest.fixture(scope="module")
def browser(synthetic_folder: str) -> Iterator[WebShopBrowserEnv]:
    try:
        made = WebShopBrowserEnv(synthetic_folder, reveal=True)
    except UsageError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def play(env: WebShopEnv, agent: RuleAgent, task: int) -> tuple[list[str], float, object]:
    """The agent's actions, the reward, and what was bought."""
    spec = EpisodeSpec(episode_id="0", env_id=ID, task=task, split="test", env_seed=0, sampling_seed=0)
    player = agent.player(Briefing(spec=spec, instructions=env.instructions))
    seen, info = env.reset(seed=0, options={"task": task, "split": "test"})
    actions: list[str] = []
    over, reward = False, 0.0
    while not over:
        actions.append(player.choose(seen, info))
        seen, reward, terminated, truncated, info = env.step(actions[-1])
        assert info["valid"], actions
        over = terminated or truncated
    return actions, float(reward), info["purchased"]


def test_a_page_is_read_by_its_lines() -> None:
    shown = read_page(ITEM)
    assert shown.options == {"color": ["red", '5" wide, "deep"'], "size": ["red"]}
    assert shown.clicks == {
        "back to search": "e1",
        "color: red": "e2",
        'color: 5" wide, "deep"': "e3",
        "size: red": "e4",
        "buy now": "e5",
    }
    assert shown.by_reference("click[size: red]") == "click[e4]"
    assert shown.field == ""


def test_a_search_is_typed_into_the_field() -> None:
    shown = read_page('WebShop\n[e1] searchbox "What are you looking for?": old\n[e2] button "Search"')
    assert shown.by_reference("search[red lamp]") == "type[e1][red lamp]"
    assert len(shown.by_reference(f"search[{'a' * 5000}]")) == len("type[e1][]") + 1000


def test_the_rule_buys_what_it_buys_in_text(browser: WebShopBrowserEnv, synthetic_folder: str) -> None:
    text = WebShopEnv(synthetic_folder)
    here = play(text, RuleAgent(SETUP), 0)
    there = play(browser, BrowserRule(SETUP), 0)
    assert here[1:] == there[1:]
    assert len(here[0]) == len(there[0])


def test_the_oracle_earns_everything(browser: WebShopBrowserEnv, synthetic_folder: str) -> None:
    text = WebShopEnv(synthetic_folder, reveal=True)
    here = play(text, Oracle(SETUP), 1)
    there = play(browser, BrowserOracle(SETUP), 1)
    assert here[1:] == there[1:]
    assert there[1] == 1


def test_the_goal_is_told_to_nobody_else(synthetic_folder: str) -> None:
    with pytest.raises(UsageError, match="reveal=True"):
        BrowserOracle(AgentSetup(env_id=ID))
