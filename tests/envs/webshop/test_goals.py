"""How goals are made."""

from collections import Counter

import pytest

from rollgym.envs.webshop.goals import (
    attribute_counts,
    combinations,
    human_goals,
    original_order,
    price_bound,
    price_words,
    synthetic_goals,
)
from rollgym.envs.webshop.types import NO_BOUND, HumanInstruction, Product


def product(price: float = 24.0, **options: tuple[str, ...]) -> Product:
    return Product(
        asin="B1",
        title="Desk Lamp",
        category="electronics",
        query="lamps",
        product_category="Lamps",
        prices=(price,),
        price=price,
        options=options,
    )


@pytest.mark.parametrize(
    ("price", "possible"),
    [
        (24.0, {40.0, 50.0, 60.0}),
        (30.0, {50.0, 60.0, 70.0}),
        (0.5, {20.0, 30.0, 40.0}),
        (-3.0, {20.0, 30.0, 40.0}),
        (965.0, {980.0, 990.0}),
        (975.0, {990.0}),
        (985.0, {NO_BOUND}),
        (5000.0, {NO_BOUND}),
    ],
)
def test_the_bound_is_one_of_the_next_four_tens_but_never_the_first(
    price: float, possible: set[float]
) -> None:
    assert {price_bound(price, seed) for seed in range(60)} == possible


def test_bounds_have_the_original_s_chances() -> None:
    # The greater of two of four: the second in 1 of 6 draws, the third in 2, the fourth in 3.
    drawn = Counter(price_bound(5.0, "chances", seed) for seed in range(3000))
    assert drawn[20.0] / 3000 == pytest.approx(1 / 6, abs=0.03)
    assert drawn[40.0] / 3000 == pytest.approx(3 / 6, abs=0.03)


def test_the_same_seed_gives_the_same_bound_whoever_asks() -> None:
    lamp = product(color=("red", "blue"))
    first, second = (list(synthetic_goals(lamp, "A lamp", ["x"], counts={"x": 1}, seed=3)) for _ in range(2))
    assert first == second
    assert len({goal.price_upper for goal in first}) == 1
    seeds = {
        next(synthetic_goals(lamp, "A lamp", ["x"], counts={"x": 1}, seed=n)).price_upper for n in range(20)
    }
    assert len(seeds) == 3


def test_no_bound_is_not_spoken_of() -> None:
    assert price_words(NO_BOUND) == ""
    assert price_words(40.0) == ", and price lower than 40.00 dollars"


def test_there_is_a_goal_for_each_way_to_choose_options() -> None:
    lamp = product(size=("s", "l"), color=("red", "blue", "green"))
    goals = list(synthetic_goals(lamp, "A lamp", ["cheap", "warm"], counts={"cheap": 6, "warm": 12}, seed=0))
    assert [goal.options for goal in goals] == list(combinations(lamp))
    assert goals[1].options == {"color": "red", "size": "l"}
    words = price_words(goals[1].price_upper)
    assert goals[1].instruction == f"A lamp with color: red, and size: l{words}"
    assert goals[1].weight == pytest.approx((1 / 6 + 1 / 12) / 2)
    assert not goals[1].human


def test_without_options_there_is_one_goal() -> None:
    [goal] = synthetic_goals(product(2000.0), "A lamp", ["warm"], counts={"warm": 1})
    assert (goal.instruction, goal.options, goal.price_upper) == ("A lamp", {}, NO_BOUND)


def test_attributes_count_once_for_each_goal() -> None:
    two = product(color=("red", "blue"))
    assert attribute_counts([(two, ["warm", "cheap"]), (product(), ["warm"])]) == {"warm": 3, "cheap": 2}


def test_people_s_goals_have_values_without_names_and_need_an_attribute() -> None:
    requests = [HumanInstruction("I want a lamp.", ("warm",), ("red",)), HumanInstruction("Any lamp.")]
    [goal] = human_goals(product(), requests)
    assert goal.instruction == f"I want a lamp{price_words(goal.price_upper)}"
    assert (goal.options, goal.attributes, goal.weight, goal.human) == (("red",), ("warm",), 1.0, True)


def test_the_order_is_a_permutation_that_never_changes() -> None:
    # Python promises that a seeded shuffle stays the same.
    assert original_order(8) == [6, 7, 0, 5, 3, 1, 4, 2]
    assert original_order(1000) == original_order(1000)
    assert sorted(original_order(1000)) == list(range(1000))
