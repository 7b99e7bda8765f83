"""The rule that buys the first product found, and the oracle that knows which it should be."""

from typing import Any

import pytest

from rollgym.core.agent import AgentSetup, Briefing, make_agent
from rollgym.core.errors import UsageError
from rollgym.core.types import EpisodeSpec
from rollgym.envs.webshop.env import WebShopEnv
from rollgym.envs.webshop.matching import matching_values
from rollgym.envs.webshop.oracle import Oracle
from rollgym.envs.webshop.rule_agent import BrowsingAgent, RuleAgent, click_on

VIEWS = ["text", "text_rich", "compact"]
RULES = ["original", "clean"]
ID = "rollgym/WebShop-v0"


def play(
    env: WebShopEnv, agent: RuleAgent, task: int = 0, split: str = "train", seed: int = 0
) -> list[tuple[str, Any]]:
    """What the agent does, each action with the reward and the info after it."""
    spec = EpisodeSpec(episode_id="0", env_id=ID, task=task, split=split, env_seed=0, sampling_seed=seed)
    player = agent.player(Briefing(spec=spec, instructions=env.instructions))
    seen, info = env.reset(seed=0, options={"task": task, "split": split})
    done: list[tuple[str, Any]] = []
    over = False
    while not over:
        action = player.choose(seen, info)
        seen, reward, terminated, truncated, info = env.step(action)
        assert info["valid"], action
        done.append((action, (reward, info)))
        over = terminated or truncated
    return done


def rule(**options: Any) -> RuleAgent:
    return RuleAgent(AgentSetup(env_id=ID), **options)


def oracle() -> Oracle:
    return Oracle(AgentSetup(env_id=ID, env_kwargs={"reveal": True}))


def test_values_are_found_as_whole_words_the_longest_first() -> None:
    options = {"size": ("large", "x-large"), "color": ("red", "navy"), "fit": ("regular", "slim")}
    assert matching_values(options, "A shirt in X-Large, not tired") == {"size": "x-large"}
    # A value that stands behind its option's name counts before one that stands anywhere.
    instruction = "a navy style shirt with color: red, and size: large"
    assert matching_values(options, instruction) == {"size": "large", "color": "red"}
    assert matching_values({}, instruction) == {}
    assert matching_values({"size": ("12 | 14", "c++ (new)")}, "size: 12 | 14") == {"size": "12 | 14"}


def test_a_value_is_clicked_by_the_name_the_page_lists() -> None:
    info = {"clickables": ["buy now", "large", "cable: cold", "a b", "light: buy now"]}
    assert click_on("size", "large", info) == "click[large]"
    assert click_on("cable", "cold", info) == "click[cable: cold]"
    assert click_on("note", "a  b", info) == "click[a b]"
    assert click_on("light", "buy now", info) == "click[light: buy now]"  # not the button


def find_mug(env: WebShopEnv) -> tuple[str, int]:
    """The task that wants the blue mug, x-large and rectangular."""
    for split, size in env.tasks.splits.items():
        for task in range(size):
            env.reset(options={"task": task, "split": split})
            if env.goal.options == {"color": "rectangular", "size": "x-large"}:
                return split, task
    raise AssertionError("no such goal")


def test_the_rule_searches_opens_the_first_chooses_and_buys(shop_folder: str) -> None:
    env = WebShopEnv(shop_folder)
    split, task = find_mug(env)
    done = play(env, rule(), task, split)
    assert [action for action, _ in done] == [
        f"search[{env.goal.instruction}]",
        "click[b0000mug01]",
        "click[x-large]",
        "click[rectangular]",
        "click[buy now]",
    ]
    assert done[-1][1][0] == 1.0


def test_the_rule_can_leave_options_alone(shop_folder: str) -> None:
    env = WebShopEnv(shop_folder)
    split, task = find_mug(env)
    done = play(env, rule(options=False), task, split)
    assert [action for action, _ in done][1:] == ["click[b0000mug01]", "click[buy now]"]
    assert done[-1][1][0] == 0.5  # the attribute and the price, of these and two options


def test_in_the_compact_view_agents_speak_its_words(shop_folder: str) -> None:
    env = WebShopEnv(shop_folder, observation="compact")
    split, task = find_mug(env)
    done = play(env, rule(), task, split)
    assert [a for a, _ in done] == ["search", "open a", "choose x-large", "choose rectangular", "buy"]
    assert done[-1][1][1]["success"]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("rules", RULES)
def test_the_oracle_buys_the_goal_s_product_with_its_options(shop_folder: str, rules: str, view: str) -> None:
    env = WebShopEnv(shop_folder, rules=rules, observation=view, reveal=True)
    for split, size in env.tasks.splits.items():
        for task in range(size):
            _, (_, info) = play(env, oracle(), task, split)[-1]
            assert info["purchased"]["asin"] == env.goal.asin
            # The original cannot choose all values of the lamp: two options share one, a button has one.
            if rules == "clean" or "LAMP" not in env.goal.asin:
                assert info["purchased"]["options"] == dict(env.goal.options)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("rules", RULES)
def test_the_rule_always_does_what_is_possible_and_buys(synthetic_folder: str, rules: str, view: str) -> None:
    env = WebShopEnv(synthetic_folder, rules=rules, observation=view)
    for task in range(25):
        assert play(env, rule(), task, "test")[-1][1][1]["purchased"]


def test_the_oracle_searches_by_title_where_the_instruction_does_not_lead(synthetic_folder: str) -> None:
    env = WebShopEnv(synthetic_folder, observation="compact", reveal=True)
    detours = []
    for task in range(60):
        done = play(env, oracle(), task, "train")
        assert done[-1][1][1]["success"]
        searches = [action for action, _ in done if action.startswith("search")]
        title = env.shop.by_asin(env.goal.asin).title
        detours += searches[1:]
        assert all(title.lower() in action.lower() for action in searches[1:])
    assert detours


def test_the_oracle_gives_up_in_time_where_the_product_is_never_found(shop_folder: str) -> None:
    agent = oracle()
    spec = EpisodeSpec(episode_id="0", env_id=ID, env_seed=0, sampling_seed=0)
    player = agent.player(Briefing(spec=spec, instructions=""))
    goal = {"asin": "B1", "title": "Lost [x]", "options": ["red"]}
    facts = {"goal": goal, "instruction": "a thing", "options": {"color": ["red", "blue"]}}
    results = {**facts, "page": "results", "clickables": ["back to search", "next >", "b2"]}
    assert player.choose("", {**facts, "page": "search"}) == "search[a thing]"
    assert player.choose("", results) == "click[back to search]"
    assert player.choose("", {**facts, "page": "search"}) == "search[Lost x]"
    assert player.choose("", results) == "click[next >]"
    assert player.choose("", {**results, "clickables": ["back to search"]}) == "click[back to search]"
    # A person's goal names values only.
    assert player.clicks({**facts, "clickables": ["red", "blue"]}) == ["click[red]"]


def test_nobody_is_told_the_goal_unless_it_is_asked_for(shop_folder: str) -> None:
    assert "goal" not in WebShopEnv(shop_folder).reset(seed=0)[1]
    env = WebShopEnv(shop_folder, reveal=True)
    _, info = env.reset(seed=0)
    title = env.shop.by_asin(env.goal.asin).title
    assert info["goal"] == {"asin": env.goal.asin, "title": title, "options": dict(env.goal.options)}
    assert env.tasks.name == WebShopEnv(shop_folder).tasks.name
    with pytest.raises(UsageError, match="reveal=True"):
        Oracle(AgentSetup(env_id=ID))


def test_the_rule_waits_where_a_search_finds_nothing() -> None:
    player = rule().player(
        Briefing(spec=EpisodeSpec(episode_id="0", env_id=ID, env_seed=0, sampling_seed=0), instructions="")
    )
    info = {"page": "results", "clickables": ["back to search"], "options": {}}
    assert player.choose("", info) == "click[back to search]"
    assert player.choose("", {**info, "page": "sub"}) == "click[< prev]"


def test_who_browses_opens_any_product_the_same_one_for_the_same_seed(synthetic_folder: str) -> None:
    env = WebShopEnv(synthetic_folder, observation="compact")
    browsing = BrowsingAgent(AgentSetup(env_id=ID))
    opened = []
    for seed in range(60):
        done = [action for action, _ in play(env, browsing, seed % 20, "test", seed)]
        assert done == [action for action, _ in play(env, browsing, seed % 20, "test", seed)]
        assert (done[0], done[-1]) == ("search", "buy")
        opened.append(done[1])
    assert {*opened} == {f"open {letter}" for letter in "abcdefghij"}


def test_they_go_by_name() -> None:
    setup = AgentSetup(env_id=ID, env_kwargs={"reveal": True})
    assert type(make_agent("expert", setup)) is RuleAgent
    assert type(make_agent("expert", setup, options=False)) is RuleAgent
    assert type(make_agent("rollgym.envs.webshop.oracle:Oracle", setup)) is Oracle
    with pytest.raises(UsageError, match="reveal"):
        make_agent("rollgym.envs.webshop.oracle:Oracle", AgentSetup(env_id=ID))
