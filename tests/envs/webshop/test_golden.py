"""Equal to the original, as its golden files have it: goals, rewards, whole episodes."""

from typing import Any

import msgspec
import pytest

from rollgym.envs.webshop.goals import human_goals, price_words
from rollgym.envs.webshop.pages import Page, text, text_rich, view
from rollgym.envs.webshop.reward import score
from rollgym.envs.webshop.rules import CLEAN, ORIGINAL, Rules
from rollgym.envs.webshop.session import Outcome, Session, act
from rollgym.envs.webshop.types import NO_BOUND, Goal

Original = Any  # the fixture's class: see conftest.py


def test_all_goals_are_the_original_s_in_its_order(original: Original) -> None:
    golden = original.golden_lines("goals")
    assert len(golden) == len(original.goals) == 6910
    for ours, theirs in zip(original.goals, golden, strict=True):
        product = original.catalog.product(original.catalog.number(ours.asin))
        assert ours.asin == theirs["asin"]
        assert list(ours.attributes) == theirs["attributes"]
        assert ours.options == theirs["goal_options"]
        assert ours.weight == theirs["weight"]
        # The bound itself is drawn, and unseeded in the original; the rest of the sentence is not.
        words = theirs["instruction_text"].removesuffix(price_words(theirs["price_upper"]))
        assert ours.instruction == words + price_words(ours.price_upper)
        assert (ours.price_upper == NO_BOUND) == (theirs["price_upper"] == NO_BOUND)
        same = ("query", "category", "product_category")
        assert {name: getattr(product, name) for name in same} == {name: theirs[name] for name in same}
        assert product.title == theirs["name"]


def test_price_bounds_are_among_those_the_original_could_draw(original: Original) -> None:
    for goal in original.goals[:500]:
        product = original.catalog.product(original.catalog.number(goal.asin))
        above = [10.0 * n for n in range(1, 100) if 10.0 * n > product.price][:4]
        assert goal.price_upper in above[1:] or goal.price_upper == NO_BOUND


def test_all_rewards_are_the_original_s(original: Original) -> None:
    golden = original.golden_lines("rewards")
    assert len(golden) == 3000
    catalog = original.catalog
    for case in golden:
        goal = msgspec.structs.replace(original.goals[case["goal_idx"]], price_upper=case["price_upper"])
        product = catalog.product(catalog.number(case["asin"]))
        product = msgspec.structs.replace(product, price=case["price"])
        target = catalog.product(catalog.number(goal.asin))
        ours = score(product, target, goal, case["options"], ORIGINAL)
        assert ours.reward == pytest.approx(case["reward"], abs=1e-9), case
        assert ours.parts() == pytest.approx(case["info"], abs=1e-9), case


@pytest.mark.parametrize(("rules", "reachable"), [(ORIGINAL, 6452), (CLEAN, 6910)])
def test_so_many_goals_are_fulfilled_by_their_own_product(
    original: Original, rules: Rules, reachable: int
) -> None:
    fulfilled = 0
    for goal in original.goals:
        product = original.catalog.product(original.catalog.number(goal.asin))
        fulfilled += score(product, product, goal, goal.options, rules).reward == 1
    assert fulfilled == reachable


@pytest.mark.parametrize(
    ("first", "end", "mean", "success"), [(0, 500, 99.38, 96.0), (500, 1500, 98.84, 92.8)]
)
def test_who_knows_the_product_scores_as_much_as_in_the_original(
    original: Original, first: int, end: int, mean: float, success: float
) -> None:
    earned = []
    for goal in original.goals[first:end]:
        product = original.catalog.product(original.catalog.number(goal.asin))
        earned.append(score(product, product, goal, goal.options, ORIGINAL).reward)
    assert 100 * sum(earned) / len(earned) == pytest.approx(mean, abs=0.005)
    assert 100 * sum(reward == 1 for reward in earned) / len(earned) == pytest.approx(success, abs=0.05)


def test_people_s_goals_can_be_fulfilled_under_clean_rules(original: Original) -> None:
    pairs = [(r.product, g) for r in original.records for g in human_goals(r.product, r.instructions.human)]
    assert len(pairs) == 13
    for product, goal in pairs:
        chosen = {n: v for n, values in product.options.items() for v in values if v in goal.options}
        assert score(product, product, goal, chosen, CLEAN).reward == 1


def test_all_episodes_are_the_original_s_at_every_step(original: Original) -> None:
    episodes = original.golden_lines("episodes")
    assert len(episodes) == 75
    shop = original.shop("original")
    for episode in episodes:
        goal = msgspec.structs.replace(
            original.goals[episode["session"]],
            instruction=episode["instruction"],
            price_upper=episode["price_upper"],
        )
        session = Session(str(episode["session"]))
        _same(episode["initial"], view(shop, goal, session))
        for step in episode["steps"]:
            outcome = act(shop, goal, session, step["action"])
            session = outcome.session
            _same(step, view(shop, goal, session))
            assert outcome.reward == pytest.approx(step["reward"], abs=1e-9)
            assert outcome.done == step["done"]
        _same_score(episode, outcome)


def test_every_goal_can_be_clicked_to_its_end_under_clean_rules(original: Original) -> None:
    shop = original.shop("clean")
    for number, goal in enumerate(original.goals):
        product = original.catalog.number(goal.asin)
        values = [value for name in goal.options for value in shop.product(product).options[name]]
        if number % 10 and len(values) == len({*values}):
            continue
        session = Session("0", "results", ("x",), (product,))
        clicks = [f"{name}: {value}" for name, value in goal.options.items()]
        for name in (goal.asin, *clicks, "buy now"):
            outcome = act(shop, goal, session, f"click[{name}]")
            assert outcome.valid, (goal, name)
            session = outcome.session
        assert outcome.reward == 1, goal


def _same(golden: dict[str, Any], page: Page) -> None:
    assert text(page) == golden["text"]
    assert text_rich(page) == golden["text_rich"]
    assert page.url == golden["url"]
    assert page.clickables == golden["clickables"]
    assert page.has_search_bar == golden["has_search_bar"]


def _same_score(episode: dict[str, Any], outcome: Outcome) -> None:
    if outcome.score is not None:
        assert outcome.score.parts() == pytest.approx(episode["reward_info"], abs=1e-9)


def test_the_goal_of_an_episode_is_in_our_list(original: Original) -> None:
    for episode in original.golden_lines("episodes"):
        goal: Goal = original.goals[episode["session"]]
        bare = goal.instruction.removesuffix(price_words(goal.price_upper))
        assert episode["instruction"].removesuffix(price_words(episode["price_upper"])) == bare
