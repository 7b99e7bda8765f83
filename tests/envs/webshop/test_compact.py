"""The compact view: few words for a page, few words for an action, the same shop behind it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.envs.webshop.catalog.build import resolve_shop
from rollgym.envs.webshop.compact import (
    compact,
    compact_actions,
    lacks,
    price_bound,
    product_words,
    search_words,
    shop_action,
    shop_words,
    spoken,
)
from rollgym.envs.webshop.env import WebShopEnv
from rollgym.envs.webshop.pages import Page, view
from rollgym.envs.webshop.session import Session, act
from rollgym.envs.webshop.shop import Shop
from rollgym.envs.webshop.types import Product

RULES = ["original", "clean"]


@pytest.fixture(scope="module")
def simple_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLGYM_CACHE", str(tmp_path_factory.mktemp("cache")))
        return str(resolve_shop("simple:200"))


def pages(shop: Shop, *actions: str, goal: int = 0) -> list[Page]:
    """The pages one sees, from the first on."""
    shop_goal, session = shop.catalog.goal(goal), Session("0")
    seen = [view(shop, shop_goal, session)]
    for action in actions:
        outcome = act(shop, shop_goal, session, shop_action(action, seen[-1]))
        assert outcome.valid, action
        session = outcome.session
        seen.append(view(shop, shop_goal, session))
    return seen


def test_pages_are_told_in_a_few_lines(hand_made_shop: Callable[[str], Shop]) -> None:
    shop = hand_made_shop("clean")
    start, results, item, chosen, back, done = pages(
        shop, "search blue mug", "open a", "choose x-large", "back", "open a"
    )
    request = "find me a hand made mug with color: rectangular, and size: x-large\n"
    assert compact(start, shop) == f"{request}start"
    lines = compact(results, shop).removeprefix(request).splitlines()
    # What products lack, in the order of the request, and their letters; those that lack least come last.
    assert lines == ["page 1 more", "lacks rectangular x-large b c d e f g h i j", "lacks nothing a"]
    assert compact(item, shop) == (
        f"{request}item\n12.5 blue mug\nsize none | large | x-large\ncolor none | navy blue | rectangular\n"
        "lacks x-large rectangular"
    )
    assert "size x-large | large | x-large\n" in compact(chosen, shop)
    assert compact(chosen, shop).endswith("\nlacks rectangular")
    assert compact(back, shop).endswith("\nlacks nothing a seen")
    assert done.kind == "item"


def _cup(title: str, *prices: float, **options: tuple[str, ...]) -> Product:
    return Product(
        asin=title,
        title=title,
        category="",
        query="",
        product_category="",
        prices=prices,
        price=prices[-1],
        options=options,
    )


def test_what_a_product_lacks_is_read_off_it_and_the_others() -> None:
    found = [
        _cup("Big Red Cup", 5),
        _cup("Flat Cup with Lid", 8, 30, color=("navy blue", "red")),
        _cup("Plate", 20.5, color=("Navy Blue",), size=("small",)),
    ]
    instruction = "Find a flat cup with handle, color: Navy  Blue, size large, for under 20 dollars"
    # Nobody here has a handle or the size large; of a range of prices the lower end counts.
    assert lacks(found, instruction) == [["flat", "navy blue"], [], ["flat", "cup", "price"]]
    assert lacks(found[:1], instruction) == [[]]
    assert lacks(found, "red thing") == [[], [], ["red"]]
    assert lacks([], instruction) == []


@pytest.mark.parametrize(
    ("said", "bound"),
    [
        ("a mug, and price lower than 50.00 dollars", 50),
        ("a mug for 6 people, my budget is 1,200 dollars.", 1200),
        ("a mug costing less than $7.5.", 7.5),
        ("a mug of 12 ounces", math.inf),
    ],
)
def test_the_bound_of_the_price_is_what_is_said_in_dollars(said: str, bound: float) -> None:
    assert price_bound(said) == bound


def test_a_range_of_prices_and_the_parts_of_a_product_are_told(hand_made_shop: Callable[[str], Shop]) -> None:
    shop = hand_made_shop("clean")
    *_, results, item = pages(shop, "search lamp", "open a", goal=1)
    assert compact(results, shop).endswith("\nlacks nothing a")
    assert "\n20 to 30 desk lamp\n" in compact(item, shop)
    # As the actions call them.
    assert compact(item, shop).endswith("\nlacks light: cold cable: cold")
    mug = pages(shop, "search blue mug", "open a", "features")[-1]
    assert compact(mug, shop).endswith("\nfeatures\nholds half a litre")
    assert compact(pages(shop, "search zzz")[-1], shop).endswith("\npage 1\nnothing found")


def test_after_a_purchase_nothing_is_left_to_do(hand_made_shop: Callable[[str], Shop]) -> None:
    shop = hand_made_shop("clean")
    last = pages(shop, "search blue mug", "open a", "buy")[-1]
    assert (compact(last, shop), compact_actions(last)) == ("bought", {})


def test_actions_stand_for_the_shop_s_own(hand_made_shop: Callable[[str], Shop]) -> None:
    start, results, item = pages(hand_made_shop("clean"), "search lamp", "open a", goal=1)
    assert compact_actions(start) == {"search": "search[Find me a lamp with cold light and a cold cable]"}
    assert compact_actions(results) == {"open a": "click[b000lamp02]", "back": "click[back to search]"}
    # Values that two options or a button share go by the option's name as well.
    assert compact_actions(item) == {
        "choose warm": "click[warm]",
        "choose light: cold": "click[light: cold]",
        "choose light: buy now": "click[light: buy now]",
        "choose cable: cold": "click[cable: cold]",
        'choose a "long" one': 'click[a "long" one]',
        "choose søft": "click[søft]",
        "features": "click[features]",
        "description": "click[description]",
        "buy": "click[buy now]",
        "back": "click[< prev]",
    }


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (" Open  A ", "click[b000lamp02]"),
        ("`back`.", "click[back to search]"),
        ("search red [shirt]", "search[red shirt]"),
        ("search", ""),
        ("open b", ""),
        ("click[b000lamp02]", ""),
        ("", ""),
    ],
)
def test_actions_are_read_whatever_surrounds_them_but_not_guessed(
    hand_made_shop: Callable[[str], Shop], said: str, meant: str
) -> None:
    assert shop_action(said, pages(hand_made_shop("clean"), "search lamp", goal=1)[-1]) == meant


def test_what_is_searched_for_is_the_first_clause() -> None:
    assert product_words("find soft cotton shirt, color red, under 30 dollars") == "find soft cotton shirt"
    assert product_words("A mug. It should be blue.") == "A mug"
    assert product_words("size 2.5 mugs") == "size 2.5 mugs"
    assert product_words(", what?") == ", what?"
    assert (search_words("a [b]  c"), search_words("[]")) == ("a b c", "anything")


def test_a_shop_s_action_is_spoken_as_the_environment_has_it() -> None:
    info = {"means": {"open a": "click[b1]"}}
    assert spoken("click[b1]", info) == "open a"
    assert spoken("search[red mug]", info) == "search red mug"
    assert spoken("click[b1]", {}) == "click[b1]"


@pytest.mark.parametrize("rules", RULES)
def test_every_listed_action_is_possible(shop_folder: str, rules: str) -> None:
    env = WebShopEnv(shop_folder, rules=rules, observation="compact")
    rng = np.random.default_rng(0)
    played = set()
    for episode in range(40):
        seen, info = env.reset(seed=episode)
        over = False
        while not over:
            action = env.random_action(seen, info, rng)
            assert action in info["actions"]
            played.add(action.split()[0])
            seen, _, terminated, truncated, info = env.step(action)
            assert info["valid"], action
            over = terminated or truncated
    assert played == {
        *("search", "open", "next", "prev", "back", "choose", "features", "description", "buy"),
    }


def test_what_is_not_possible_is_said_and_costs_a_turn(shop_folder: str) -> None:
    env = WebShopEnv(shop_folder, observation="compact")
    first, _ = env.reset(seed=0)
    observation, reward, _, _, info = env.step("open a")
    assert (observation, reward, info["valid"]) == (f"not possible\n{first}", 0.0, False)


def test_rewards_are_those_of_the_other_views(simple_folder: str) -> None:
    short, full = WebShopEnv(simple_folder, observation="compact"), WebShopEnv(simple_folder)
    rng = np.random.default_rng(0)
    earned = []
    for task in range(30):
        seen, info = short.reset(options={"task": task})
        full.reset(options={"task": task})
        over = False
        while not over:
            action = "buy" if "buy" in info["actions"] else short.random_action(seen, info, rng)
            meant = info["means"][action]
            seen, reward, terminated, truncated, info = short.step(action)
            assert full.step(meant)[1:4] == (reward, terminated, truncated)
            over = terminated or truncated
        earned.append(reward)
    assert len({*earned}) > 3


def test_gymnasium_accepts_it(simple_folder: str) -> None:
    check_env(WebShopEnv(simple_folder, observation="compact"), skip_render_check=True)


def test_a_page_of_a_simple_shop_is_at_most_some_sixty_words(simple_folder: str) -> None:
    env = WebShopEnv(simple_folder, observation="compact")
    lengths = []
    for task in range(50):
        env.reset(options={"task": task, "split": "test"})
        lengths.append(len(env.step("search")[0].split()))
    assert 40 < max(lengths) < 85


def test_all_words_of_a_simple_shop_are_known_beforehand(simple_folder: str) -> None:
    env = WebShopEnv(simple_folder, observation="compact")
    vocabulary = {*env.words}
    assert len(vocabulary) < 200
    unknown: dict[str, Any] = {}
    for task in range(100):
        seen, _ = env.reset(options={"task": task, "split": "test"})
        for text in (seen, env.step("search")[0], env.step("open a")[0]):
            words = text.replace(",", " ").replace("|", " ").split()
            unknown.update((w, text) for w in words if w.isalpha() and len(w) > 1 and w not in vocabulary)
    assert set(unknown) <= {"start", "page", "more", "item", "none", "lacks", "nothing", "price"}
    assert WebShopEnv(simple_folder).words == ()


def test_words_are_counted_once_a_product_and_rare_ones_left_out(
    hand_made_shop: Callable[[str], Shop],
) -> None:
    words = shop_words(hand_made_shop("clean").catalog)
    # Mug: 13 products and a goal; number: the 11 fillers. Lamp is said twice only.
    assert words[:2] == ["mug", "number"]
    assert "lamp" not in words


@pytest.mark.parametrize("observation", ["text", "text_rich", "url", "html", "compact"])
def test_every_view_tells_an_agent_how_to_act(shop_folder: str, observation: str) -> None:
    instructions = WebShopEnv(shop_folder, observation=observation, max_turns=9).instructions
    assert "one action per turn" in instructions
    assert "You have 9 turns." in instructions
    grammar = {"search[", "click[buy now]"}
    short = {"\n- open a:", "\n- choose red:", "\n- buy:"}
    assert all(piece in instructions for piece in (short if observation == "compact" else grammar))
    assert not any(piece in instructions for piece in (grammar if observation == "compact" else short))
