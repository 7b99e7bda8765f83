"""What actions do, by hand-worked examples."""

from typing import Any

import pytest

from rollgym.envs.webshop.pages import view
from rollgym.envs.webshop.session import Outcome, Session, act
from rollgym.envs.webshop.shop import Shop

RULES = ["original", "clean"]
BASE = "http://127.0.0.1:3000"


def play(shop: Shop, *actions: str, goal: int = 0) -> Outcome:
    """The outcome of the last of these actions, each of which but the last must be possible."""
    shop_goal, session = shop.catalog.goal(goal), Session("7")
    for number, action in enumerate(actions):
        outcome = act(shop, shop_goal, session, action)
        assert outcome.valid or number == len(actions) - 1, action
        session = outcome.session
    return outcome


@pytest.mark.parametrize("rules", RULES)
def test_a_search_leads_to_its_first_page_of_results(hand_made_shop: Any, rules: str) -> None:
    session = play(hand_made_shop(rules), "search[blue mug]").session
    assert (session.kind, session.words, session.number) == ("results", ("blue", "mug"), 1)
    assert session.hits[:3] == (0, 2, 3)
    assert len(session.hits) == 13
    assert session.url == f"{BASE}/search_results/7/blue+mug/1"


@pytest.mark.parametrize("rules", RULES)
def test_pages_are_turned_and_turned_back(hand_made_shop: Any, rules: str) -> None:
    shop = hand_made_shop(rules)
    there = play(shop, "search[mug]", "click[next >]")
    assert there.session.number == 2
    assert play(shop, "search[mug]", "click[next >]", "click[< prev]").session.number == 1
    assert not play(shop, "search[mug]", "click[< prev]").valid


def test_only_the_original_turns_to_empty_pages(hand_made_shop: Any) -> None:
    turns = ["search[mug]", *["click[next >]"] * 3]
    assert play(hand_made_shop("original"), *turns).session.number == 4
    assert not play(hand_made_shop("clean"), *turns[:3]).valid


@pytest.mark.parametrize("rules", RULES)
def test_options_are_chosen_changed_and_kept_over_parts(hand_made_shop: Any, rules: str) -> None:
    shop = hand_made_shop(rules)
    actions = ["search[blue]", "click[B0000MUG01]", "click[large]", "click[navy blue]", "click[x-large]"]
    chosen = (("size", "x-large"), ("color", "navy blue"))
    session = play(shop, *actions).session
    assert (session.kind, session.options) == ("item", chosen)
    assert session.url == (
        f'{BASE}/item_page/7/B0000MUG01/blue/1/{{"size": "x-large", "color": "navy blue"}}'
    )
    part = play(shop, *actions, "click[features]").session
    assert part.url == (
        f"{BASE}/item_sub_page/7/B0000MUG01/blue/1/Features/{{'size': 'x-large', 'color': 'navy blue'}}"
    )
    assert play(shop, *actions, "click[features]", "click[< prev]").session == session


@pytest.mark.parametrize("rules", RULES)
def test_going_back_to_results_forgets_the_choice_but_not_the_visit(hand_made_shop: Any, rules: str) -> None:
    shop = hand_made_shop(rules)
    actions = ["search[mug]", "click[b0000mug01]", "click[large]", "click[< prev]"]
    session = play(shop, *actions).session
    assert (session.kind, session.number, session.asin, session.options) == ("results", 1, "", ())
    assert session.visited == {"B0000MUG01"}
    assert play(shop, *actions, "click[back to search]").session == Session("7")


@pytest.mark.parametrize("rules", RULES)
def test_buying_ends_the_visit_and_nothing_is_possible_after_it(hand_made_shop: Any, rules: str) -> None:
    shop = hand_made_shop(rules)
    end = play(shop, "search[plain]", "click[b0000mug03]", "click[buy now]")
    # Of the right type, hand made and cheap enough; neither of the two options.
    assert end.done
    assert end.reward == pytest.approx(2 / 4)
    assert end.session.url == f"{BASE}/done/7/B0000MUG03/{{}}"
    after = act(shop, shop.catalog.goal(0), end.session, "search[mug]")
    assert (after.valid, after.session, after.reward, after.done) == (False, end.session, 0.0, False)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    "text", ["", "nonsense", "click[nothing]", "click[buy now]", "click[search]", "[" * 500]
)
def test_what_is_not_possible_changes_nothing(hand_made_shop: Any, rules: str, text: str) -> None:
    outcome = play(hand_made_shop(rules), text)
    assert (outcome.valid, outcome.reward, outcome.done) == (False, 0.0, False)
    assert outcome.session == Session("7")


def test_the_search_bar_is_needed_under_clean_rules_only(hand_made_shop: Any) -> None:
    again = ["search[mug]", "search[lamp]"]
    assert play(hand_made_shop("original"), *again).session.words == ("lamp",)
    refused = play(hand_made_shop("clean"), *again)
    assert (refused.valid, refused.session.words) == (False, ("mug",))
    assert "back to search" in refused.note


def test_equal_values_of_two_options(hand_made_shop: Any) -> None:
    lamp = ["search[lamp]", "click[b000lamp02]"]
    assert play(hand_made_shop("original"), *lamp, "click[cold]").session.options == (("cable", "cold"),)
    clean = hand_made_shop("clean")
    assert not play(clean, *lamp, "click[cold]").valid
    both = play(clean, *lamp, "click[light: cold]", "click[cable: cold]", goal=1).session.options
    assert both == (("light", "cold"), ("cable", "cold"))
    end = play(clean, *lamp, "click[light: cold]", "click[cable: cold]", "click[buy now]", goal=1)
    assert end.reward == 1


def test_a_value_named_like_a_button(hand_made_shop: Any) -> None:
    lamp = ["search[lamp]", "click[b000lamp02]"]
    assert play(hand_made_shop("original"), *lamp, "click[buy now]").done
    clean = hand_made_shop("clean")
    assert play(clean, *lamp, "click[buy now]").done
    assert play(clean, *lamp, "click[light: buy now]").session.options == (("light", "buy now"),)


def test_every_option_answers_to_its_name_and_value_under_clean_rules(hand_made_shop: Any) -> None:
    actions = ["search[blue]", "click[b0000mug01]", "click[size: large]"]
    assert play(hand_made_shop("clean"), *actions).session.options == (("size", "large"),)
    assert not play(hand_made_shop("original"), *actions).valid


def test_the_original_mistakes_a_query_for_a_page(hand_made_shop: Any) -> None:
    actions = ["search[mug search_results]", "click[next >]", "click[b000fill09]", "click[< prev]"]
    assert play(hand_made_shop("original"), *actions).session.number == 1
    assert play(hand_made_shop("clean"), *actions).session.number == 2


def test_special_words_search_the_original_s_way(hand_made_shop: Any) -> None:
    shop = hand_made_shop("original")
    assert play(shop, "search[<q> lamps]").session.hits == (1,)
    assert len(play(shop, "search[<c> garden]").session.hits) == 14
    assert play(shop, "search[<c>]").session.hits == ()
    drawn = play(shop, "search[<r>]").session.hits
    assert sorted(drawn) == list(range(14))
    assert drawn == play(shop, "search[<r>]").session.hits
    assert not play(shop, "search[<a> red]").valid
    assert play(hand_made_shop("clean"), "search[<q> lamps]").session.hits == ()


def test_nothing_found_is_an_empty_page(hand_made_shop: Any) -> None:
    shop = hand_made_shop("clean")
    session = play(shop, "search[zzz]").session
    page = view(shop, shop.catalog.goal(0), session)
    assert page.clickables == ["back to search"]
