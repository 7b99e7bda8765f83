"""WebShop as an environment."""

import itertools
import re
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import rollgym
from rollgym.core.errors import UsageError
from rollgym.envs.webshop.env import WebShopEnv
from rollgym.envs.webshop.html import html
from rollgym.envs.webshop.pages import text
from rollgym.envs.webshop.reward import score
from rollgym.envs.webshop.shop import open_shop

RULES = ["original", "clean"]


def play(env: WebShopEnv, *actions: str, task: int = 0, split: str = "train") -> list[tuple[Any, ...]]:
    env.reset(seed=0, options={"task": task, "split": split})
    return [env.step(action) for action in actions]


def buy_the_goal(env: WebShopEnv) -> list[str]:
    """What to do for the goal: search for the title, choose the options, buy."""
    goal = env.goal
    title = env.shop.by_asin(goal.asin).title
    options = [f"click[{name}: {value}]" for name, value in dict(goal.options).items()]
    return [f"search[{title}]", f"click[{goal.asin}]", *options, "click[buy now]"]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("observation", ["text", "text_rich", "url", "html"])
def test_gymnasium_accepts_it(shop_folder: str, rules: str, observation: str) -> None:
    check_env(WebShopEnv(shop_folder, rules=rules, observation=observation), skip_render_check=True)


def test_every_goal_can_be_fulfilled_within_the_turns(shop_folder: str) -> None:
    env = WebShopEnv(shop_folder)
    for split, size in env.tasks.splits.items():
        for index in range(size):
            env.reset(options={"task": index, "split": split})
            for action in buy_the_goal(env):
                _, reward, terminated, truncated, info = env.step(action)
                assert info["valid"], action
            wanted = {"asin": env.goal.asin, "options": dict(env.goal.options)}
            bought = info["purchased"]
            assert (reward, terminated, truncated, info["success"]) == (
                _best(env),
                True,
                False,
                _best(env) == 1,
            )
            assert {**bought, "options": dict(sorted(bought["options"].items()))} == wanted
            assert info["score"]["r_price"]


def _best(env: WebShopEnv) -> float:
    """All but the lamp and the fillers, which are not hand made, can earn everything."""
    goal = env.goal
    total = 2 + len(goal.options)
    return 1.0 if "MUG" in goal.asin else (total - 1) / total


def test_only_a_purchase_is_rewarded_and_told(shop_folder: str) -> None:
    steps = play(WebShopEnv(shop_folder), "search[mug]", "click[b0000mug03]", "click[buy now]")
    assert [step[1] for step in steps[:2]] == [0.0, 0.0]
    assert [step[2] for step in steps] == [False, False, True]
    assert [step[4]["purchased"] for step in steps] == [None, None, {"asin": "B0000MUG03", "options": {}}]
    assert "score" not in steps[0][4]
    assert steps[-1][4]["score"]["r_price"] is True


def test_the_turn_limit_truncates_unless_the_last_turn_buys(shop_folder: str) -> None:
    env = WebShopEnv(shop_folder, max_turns=3)
    steps = play(env, "search[mug]", "nonsense", "click[back to search]")
    assert [(step[2], step[3]) for step in steps] == [(False, False), (False, False), (False, True)]
    assert [step[4]["turns_left"] for step in steps] == [2, 1, 0]
    steps = play(env, "search[mug]", "click[b0000mug03]", "click[buy now]")
    assert steps[-1][2:4] == (True, False)


@pytest.mark.parametrize(
    "action", ["", "hello", "click[nothing]", "search[mug", "click[" + "x" * 5000 + "]", "\ud800"]
)
def test_what_is_not_possible_is_said_and_costs_nothing_but_the_turn(shop_folder: str, action: str) -> None:
    env = WebShopEnv(shop_folder)
    first, before = env.reset(seed=0, options={"task": 0})
    observation, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated, info["valid"], info["success"]) == (
        0.0,
        False,
        False,
        False,
        False,
    )
    assert observation.startswith("Not possible: ")
    assert observation.endswith(first)
    assert info["clickables"] == before["clickables"]
    original = WebShopEnv(shop_folder, rules="original")
    first, _ = original.reset(seed=0, options={"task": 0})
    assert original.step(action)[0] == first


def test_info_has_what_the_page_offers(shop_folder: str) -> None:
    env = WebShopEnv(shop_folder)
    _, info = env.reset(options={"task": 0})
    assert info["has_search_bar"] is True
    assert info["clickables"] == ["search"]
    assert info["actions"] == ["search[your words]"]
    assert info["instruction"] == env.goal.instruction
    results, item = (step[4] for step in play(env, "search[plain]", "click[b0000mug03]"))
    assert results["actions"] == ["click[back to search]", "click[b0000mug03]"]
    assert item["actions"][-1] == "click[buy now]"
    assert (results["page"], item["page"], item["has_search_bar"]) == ("results", "item", False)


@pytest.mark.parametrize("rules", RULES)
def test_every_listed_action_is_possible(shop_folder: str, rules: str) -> None:
    env = WebShopEnv(shop_folder, rules=rules)
    actions: list[str] = []
    for action in ["search[lamp]", "click[b000lamp02]", "click[description]"]:
        listed = (play(env, *actions)[-1][4] if actions else env.reset(options={"task": 0})[1])["actions"]
        for offered in listed:
            assert play(env, *actions, offered)[-1][4]["valid"], offered
        actions.append(action)


@pytest.mark.parametrize("rules", RULES)
def test_a_random_agent_always_does_what_is_possible(shop_folder: str, rules: str) -> None:
    env, rng = WebShopEnv(shop_folder, rules=rules), np.random.default_rng(0)
    kinds = set()
    for episode in range(30):
        seen, info = env.reset(seed=episode)
        over = False
        while not over:
            action = env.random_action(seen, info, rng)
            kinds.add(action.split("[")[0])
            seen, _, terminated, truncated, info = env.step(action)
            assert info["valid"], action
            over = terminated or truncated
    assert kinds == {"search", "click"}


def test_a_random_action_depends_on_its_arguments_alone(shop_folder: str) -> None:
    env = WebShopEnv(shop_folder)
    seen, info = env.reset(options={"task": 0})
    first = [env.random_action(seen, info, np.random.default_rng(n)) for n in range(20)]
    env.step("search[mug]")
    assert [env.random_action(seen, info, np.random.default_rng(n)) for n in range(20)] == first


def test_a_task_is_the_same_in_every_environment_and_splits_share_no_product(shop_folder: str) -> None:
    env, other_env = WebShopEnv(shop_folder), WebShopEnv(shop_folder)
    products: dict[str, set[str]] = {}
    for split, size in env.tasks.splits.items():
        for index in range(size):
            options = {"task": index, "split": split}
            assert env.reset(seed=1, options=options) == other_env.reset(seed=2, options=options)
            products.setdefault(split, set()).add(env.goal.asin)
    names = list(products)
    assert names[0] == "train"
    assert all(not products[a] & products[b] for a in names for b in names if a < b)
    assert sum(env.tasks.splits.values()) == env.shop.catalog.goal_count == 25


def test_the_task_set_is_named_by_everything_that_changes_it(shop_folder: str) -> None:
    name = WebShopEnv(shop_folder).tasks.name
    assert WebShopEnv(shop_folder, observation="html", max_turns=3).tasks.name == name
    assert WebShopEnv(shop_folder, rules="original").tasks.name != name
    assert WebShopEnv(shop_folder, splits="original").tasks.name != name


def test_titles_and_lists_of_values_can_be_cut_whatever_the_goal_is() -> None:
    whole = WebShopEnv("synthetic", rules="original")
    short = WebShopEnv("synthetic", rules="original", title_words=4, option_values=2)
    for env in (whole, short):
        env.reset(seed=0, options={"task": 3})
    pages = [env.step("search[case]")[0].split(" [SEP] ") for env in (whole, short)]
    titles = [
        [piece for before, piece in itertools.pairwise(page) if re.fullmatch("B[0-9A-Z]{9}", before)]
        for page in pages
    ]
    assert len(titles[0]) == len(titles[1]) == 10
    for title, cut in zip(*titles, strict=True):
        assert cut == (title if len(title.split()) <= 4 else " ".join(title.split()[:4]) + " …")
    assert sum(map(len, pages[1])) < sum(map(len, pages[0]))
    for asin in whole.page.clickables:
        if len(asin) != 10:
            continue
        item, _, _, _, info = short.step(f"click[{asin}]")
        values = next((list(each) for each in info["options"].values() if len(each) > 2), None)
        if values is not None:
            break
        short.step("click[< prev]")
    assert values is not None, "no product on the page has an option with many values"
    pieces = item.split(" [SEP] ")
    assert [value in pieces for value in values] == [True, True] + [False] * (len(values) - 2)
    hidden = short.step(f"click[{values[2].lower()}]")
    assert hidden[4]["valid"], "a value that is not shown can still be chosen"


@pytest.mark.parametrize(("separator", "name"), [("\n", "line breaks"), (" | ", "|"), ("  ", "spaces")])
def test_the_pieces_of_a_page_can_be_joined_by_something_else(separator: str, name: str) -> None:
    usual = WebShopEnv("synthetic", rules="clean")
    other = WebShopEnv("synthetic", rules="clean", separator=separator)
    assert f"Pieces of a page are separated by {name}." in other.instructions
    for action in ("search[case]", "click[no such thing]", "click[next >]"):
        for env in (usual, other):
            if action.startswith("search"):
                env.reset(seed=0, options={"task": 3})
        assert other.step(action)[0] == usual.step(action)[0].replace(" [SEP] ", separator)
    assert other.tasks.name == usual.tasks.name


@pytest.mark.parametrize(
    "wrong",
    [
        {"rules": "orignal"},
        {"observation": "pdf"},
        {"goals": "martian"},
        {"goals": "human"},
        {"splits": "random"},
        {"search": "google"},
        {"max_turns": 0},
        {"max_turns": 2.5},
        {"title_words": 0},
        {"option_values": -1},
        {"title_words": 3, "observation": "compact"},
        {"separator": ""},
        {"separator": "|", "observation": "text_rich"},
    ],
)
def test_wrong_arguments_are_said(shop_folder: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        WebShopEnv(shop_folder, **wrong)


def test_the_search_engine_can_be_chosen(shop_folder: str) -> None:
    names = {engine: WebShopEnv(shop_folder, search=engine).tasks.name for engine in ("auto", "tantivy")}
    assert WebShopEnv(shop_folder, search="tantivy").shop.search.name == "tantivy"
    assert WebShopEnv(shop_folder, search="lucene-exact").tasks.name == names["auto"] != names["tantivy"]


def test_a_shop_that_is_not_there_is_said() -> None:
    with pytest.raises(UsageError, match="no-such-shop"):
        WebShopEnv("no-such-shop")


def test_environments_share_one_catalogue(shop_folder: str) -> None:
    first = WebShopEnv(shop_folder)
    play(first, "search[mug]", "click[b0000mug01]")
    tracemalloc.start()
    many = [WebShopEnv(shop_folder) for _ in range(100)]
    for env in many:
        play(env, "search[mug]", "click[b0000mug01]")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(env.shop is first.shop for env in many)
    assert held / 100 < 100_000


@pytest.mark.parametrize(("rules", "least"), [("clean", 1.0), ("original", 0.9)])
def test_goals_of_the_synthetic_shop_are_fulfilled_by_their_product(
    synthetic_folder: str, rules: str, least: float
) -> None:
    shop = open_shop(synthetic_folder, rules=rules, search="auto", goals="synthetic")
    fulfilled = 0
    for number in range(shop.catalog.goal_count):
        goal = shop.catalog.goal(number)
        product = shop.by_asin(goal.asin)
        fulfilled += score(product, product, goal, dict(goal.options), shop.rules).reward == 1
    assert fulfilled / shop.catalog.goal_count >= least


def test_an_episode_on_the_synthetic_shop_from_search_to_purchase(synthetic_folder: str) -> None:
    env = WebShopEnv(synthetic_folder)
    for task in range(50):
        env.reset(options={"task": task, "split": "test"})
        *_, end = [env.step(action) for action in _with_pages(env)]
        assert end[4]["success"], env.goal


def _with_pages(env: WebShopEnv) -> Iterator[str]:
    """Search for the goal's title and turn pages until it is there; then as for any goal."""
    search, product, *rest = buy_the_goal(env)
    yield search
    while env.goal.asin.lower() not in env.page.clickables:
        yield "click[next >]"
    yield from (product, *rest)


@pytest.mark.parametrize("rules", RULES)
def test_pages_of_the_synthetic_shop_read_the_same_as_html(
    synthetic_folder: str, html_text: Any, rules: str
) -> None:
    env, rng = WebShopEnv(synthetic_folder, rules=rules), np.random.default_rng(1)
    for episode in range(15):
        seen, info = env.reset(seed=episode)
        over = False
        while not over:
            assert html_text(html(env.page)) == text(env.page)
            seen, _, terminated, truncated, info = env.step(env.random_action(seen, info, rng))
            over = terminated or truncated


def test_it_is_registered() -> None:
    card = rollgym.core.registry.env_info("rollgym/WebShop-v0")
    assert card.needs == ("webshop",)
