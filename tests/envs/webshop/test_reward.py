"""What purchases earn, by hand-worked examples."""

from typing import Any

import msgspec
import pytest

from rollgym.envs.webshop.colors import COLORS, color_in
from rollgym.envs.webshop.reward import alike, score
from rollgym.envs.webshop.rules import CLEAN, ORIGINAL, Rules
from rollgym.envs.webshop.types import Goal, Product

LAMP = Product(
    asin="B1",
    title="Desk Lamp Brass",
    description="Bends easily.",
    bullets=("Warm Light", "two metre cable"),
    category="electronics",
    query="lamps",
    product_category="Home › Light › Lamps",
    prices=(30.0,),
    price=30.0,
    attributes=("energy saving",),
    nouns=("desk", "lamp", "brass"),
)
GOAL = Goal(asin="B1", instruction="", attributes=("energy saving",), options={}, price_upper=40.0)
BOTH = pytest.mark.parametrize("rules", [ORIGINAL, CLEAN])


def changed(thing: Any, **values: Any) -> Any:
    return msgspec.structs.replace(thing, **values)


def reward(product: Product, goal: Goal, rules: Rules = ORIGINAL, **chosen: str) -> float:
    return score(product, LAMP, goal, chosen, rules).reward


@BOTH
def test_the_product_itself_earns_everything(rules: Rules) -> None:
    result = score(LAMP, LAMP, GOAL, {}, rules)
    assert result.reward == 1
    assert result.parts() == {
        "r_type": 1.0,
        "r_att": 1.0,
        "w_att": 0.5,
        "query_match": True,
        "category_match": True,
        "title_score": 1.0,
        "r_price": True,
        "w_price": 0.5,
    }


@BOTH
def test_too_dear_costs_one_part(rules: Rules) -> None:
    assert reward(changed(LAMP, price=40.0), GOAL, rules) == 1
    assert reward(changed(LAMP, price=40.01), GOAL, rules) == 0.5


@BOTH
@pytest.mark.parametrize(
    ("nouns", "query", "categories", "kind"),
    [
        (("desk", "lamp"), "tables", "Other", 1.0),  # 2 of 3 nouns are more than 0.2
        (("sofa",), "lamps", "Home › Light › Lamps", 0.0),  # no noun: query and category do not help
        ((), "lamps", "Other", 0.0),
    ],
)
def test_the_type_by_nouns(
    rules: Rules, nouns: tuple[str, ...], query: str, categories: str, kind: float
) -> None:
    other = changed(LAMP, nouns=nouns, query=query, product_category=categories)
    assert score(other, LAMP, GOAL, {}, rules).type == kind


@BOTH
@pytest.mark.parametrize(
    ("shared", "query", "categories", "kind"),
    [
        (2, "tables", "Other", 0.5),  # 2 of 12 nouns: 0.17
        (2, "lamps", "Other", 1.0),
        (2, "tables", "Lamps › Light", 1.0),  # two categories in common, whatever their order
        (2, "tables", "Lamps › Lamps", 0.5),
        (1, "lamps", "Home › Light › Lamps", 0.1),  # 1 of 12: 0.08 overrides an equal query
    ],
)
def test_the_type_where_titles_share_little(
    rules: Rules, shared: int, query: str, categories: str, kind: float
) -> None:
    target = changed(LAMP, nouns=tuple(f"noun{n}" for n in range(12)))
    other = changed(LAMP, nouns=target.nouns[:shared], query=query, product_category=categories)
    assert score(other, target, GOAL, {}, rules).type == kind


def test_repeated_nouns_of_the_goal_count_each_time() -> None:
    target = changed(LAMP, nouns=("lamp", "lamp", "lamp", "desk"))
    assert score(LAMP, target, GOAL, {}, ORIGINAL).title_score == 0.5


def test_a_goal_without_nouns_is_as_good_as_little_in_common() -> None:
    target = changed(LAMP, nouns=())
    other = changed(LAMP, query="x", product_category="y")
    assert score(other, target, GOAL, {}, ORIGINAL).type == 0.5
    assert score(LAMP, target, GOAL, {}, ORIGINAL).type == 1.0


@BOTH
@pytest.mark.parametrize(
    ("wanted", "has"),
    [
        ("energy saving", True),
        ("saving energy", True),  # the words count, not their order
        ("saving", True),  # as a subset of the words
        ("warm light", True),  # in the features
        ("desk lamp", True),  # in the title
        ("bends", True),  # in the description
        ("light two metre", True),  # across two features
        ("waterproof", False),
    ],
)
def test_attributes_are_found_by_likeness_or_in_the_texts(rules: Rules, wanted: str, has: bool) -> None:
    assert score(LAMP, LAMP, changed(GOAL, attributes=(wanted,)), {}, rules).attributes == has


def options_met(wanted: Any, rules: Rules, **chosen: str) -> int:
    return score(LAMP, LAMP, changed(GOAL, options=wanted), chosen, rules).options


@pytest.mark.parametrize(
    ("wanted", "chosen", "original", "clean"),
    [
        ({"size": "x-large"}, {"size": "x-large"}, 1, 1),
        ({"size": "x-large"}, {"size": "large"}, 1, 0),  # a subset of the words is like the whole
        ({"size": "x-large"}, {"fit": "x-large"}, 1, 0),  # the original does not look at names
        ({"color": "rectangular"}, {"color": "rectangular"}, 0, 1),  # "tan" is in it
        ({"color": "black1901"}, {"color": "black1901"}, 0, 1),
        ({"color": "navy"}, {"color": "navy blue"}, 0, 0),  # "blue" comes first in the list
        ({"color": "navy blue"}, {"color": "navy blue"}, 1, 1),  # "blue" is one of "color navy blue"
        ({"color": "red"}, {"color": "bright red"}, 1, 0),
        ({"color": "red"}, {}, 0, 0),
        ({"size": "Small"}, {"size": " small"}, 1, 1),
        (("red",), {"color": "bright red"}, 1, 0),
        (("red", "large"), {"color": "red", "size": "large"}, 2, 2),
        (("rectangular",), {"shape": "rectangular"}, 1, 1),  # both become "tan"
        (("6/8 inch",), {"size": "6 | 8 inch"}, 1, 1),
    ],
)
def test_options_under_both_rules(wanted: Any, chosen: dict[str, str], original: int, clean: int) -> None:
    assert options_met(wanted, ORIGINAL, **chosen) == original
    assert options_met(wanted, CLEAN, **chosen) == clean


def test_options_weigh_like_attributes() -> None:
    goal = changed(GOAL, options={"size": "large", "color": "red"})
    assert reward(LAMP, goal, CLEAN, size="large") == pytest.approx(3 / 4)
    parts = score(LAMP, LAMP, goal, {"size": "large"}, CLEAN).parts()
    assert (parts["r_option"], parts["w_option"], parts["w_price"]) == (0.5, 0.5, 0.25)


def test_there_are_102_colour_words_and_the_first_one_counts() -> None:
    assert len(COLORS) == 102
    assert list(COLORS) == sorted(COLORS)
    assert color_in("navy blue") == "blue"
    assert color_in("dash") == "ash"
    assert color_in("xl") == "xl"


@pytest.mark.parametrize(
    ("one", "other", "like"),
    [
        ("Machine-Washable!", "machine washable", True),
        ("café", "caf", True),  # letters of Latin-1 are dropped
        ("", "anything", False),
        ("", "", False),
        ("abcdefg", "abcdefh", True),  # 85.7 rounds to 86
        ("abcdef", "abcdeg", False),  # 83.3
    ],
)
def test_likeness(one: str, other: str, like: bool) -> None:
    assert alike(one, other) == like
