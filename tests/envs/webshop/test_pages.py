"""What customers see, by hand-worked examples, and that the HTML says the same."""

from html.parser import HTMLParser
from typing import Any

import pytest

from rollgym.envs.webshop.html import html
from rollgym.envs.webshop.pages import Page, text, text_rich, view
from rollgym.envs.webshop.session import Session, act
from rollgym.envs.webshop.shop import Shop

WISH = "Find me a hand made mug with color: rectangular, and size: x-large"
MUG = ["search[blue]", "click[b0000mug01]"]
WALK = ["search[mug]", "click[next >]", "click[< prev]", "click[b0000mug01]", "click[large]"]
WALK += ["click[description]", "click[< prev]", "click[features]", "click[< prev]", "click[reviews]"]
WALK += ["click[< prev]", "click[navy blue]", "click[buy now]"]


def pages(shop: Shop, *actions: str) -> list[Page]:
    goal, session = shop.catalog.goal(0), Session("0")
    shown = [view(shop, goal, session)]
    for action in actions:
        session = act(shop, goal, session, action).session
        shown.append(view(shop, goal, session))
    return shown


@pytest.mark.parametrize("rules", ["original", "clean"])
def test_the_search_page(hand_made_shop: Any, rules: str) -> None:
    [page] = pages(hand_made_shop(rules))
    assert text(page) == f"WebShop [SEP] Instruction: [SEP] {WISH} [SEP] Search"
    assert text_rich(page) == f"WebShop\nInstruction: \n{WISH}\n[button] Search [button_]\n"
    assert (page.has_search_bar, page.clickables) == (True, ["search"])


def test_the_results_page(hand_made_shop: Any) -> None:
    page = pages(hand_made_shop("original"), "search[blue]")[-1]
    assert text(page) == (
        f"Instruction: [SEP] {WISH} [SEP] Back to Search [SEP] Page 1 (Total results: 1) [SEP] Next > [SEP] "
        "B0000MUG01 [SEP] Blue Mug [SEP] $12.5"
    )
    assert page.clickables == ["back to search", "next >", "b0000mug01"]
    clean = pages(hand_made_shop("clean"), "search[blue]")[-1]
    assert clean.clickables == ["back to search", "b0000mug01"]


def test_a_price_range_and_a_second_page(hand_made_shop: Any) -> None:
    shop = hand_made_shop("clean")
    assert text(pages(shop, "search[lamp]")[-1]).endswith("B000LAMP02 [SEP] Desk Lamp [SEP] $20.0 to $30.0")
    second = pages(shop, "search[mug]", "click[next >]")[-1]
    assert second.clickables == ["back to search", "< prev", "b000fill08", "b000fill09", "b000fill10"]


def test_the_original_hides_the_choice_in_text_and_clean_rules_show_it(hand_made_shop: Any) -> None:
    before, after = (text(p) for p in pages(hand_made_shop("original"), *MUG, "click[large]")[-2:])
    assert before == after
    assert "size [SEP] large [SEP] x-large [SEP] color [SEP] navy blue [SEP] rectangular [SEP]" in after
    before, after = (text(p) for p in pages(hand_made_shop("clean"), *MUG, "click[large]")[-2:])
    assert "size [SEP] large" in before
    assert "size (chosen: large) [SEP] large [SEP] x-large [SEP] color [SEP]" in after


@pytest.mark.parametrize("rules", ["original", "clean"])
def test_text_rich_marks_what_was_clicked_the_last_first(hand_made_shop: Any, rules: str) -> None:
    rich_text = text_rich(pages(hand_made_shop(rules), *MUG, "click[navy blue]", "click[large]")[-1])
    assert rich_text.startswith("You have clicked navy blue.\nYou have clicked large.\nInstruction:\n")
    assert "  [clicked button] large [clicked button_]\n  [button] x-large [button_]\n" in rich_text
    results = text_rich(pages(hand_made_shop(rules), *MUG, "click[< prev]")[-1])
    assert "\n\n[clicked button] B0000MUG01 [clicked button_]\nBlue Mug\n$12.5\n" in results


def test_the_original_sees_no_click_on_values_that_the_address_escapes(hand_made_shop: Any) -> None:
    actions = ["search[lamp]", "click[b000lamp02]"]
    for value in ('a "long" one', "søft"):
        original = text_rich(pages(hand_made_shop("original"), *actions, f"click[{value}]")[-1])
        clean = text_rich(pages(hand_made_shop("clean"), *actions, f"click[{value}]")[-1])
        assert "You have clicked" not in original
        assert clean.startswith(f"You have clicked {value}.\n")


def test_the_parts_of_a_product(hand_made_shop: Any) -> None:
    shop = hand_made_shop("original")
    head = f"Instruction: [SEP] {WISH} [SEP] Back to Search [SEP] < Prev"
    shown = {part: pages(shop, *MUG, f"click[{part}]")[-1] for part in ("description", "features", "reviews")}
    assert text(shown["description"]) == f"{head} [SEP] A mug for <tea> & coffee."
    # An empty feature leaves an empty piece, as in the original.
    assert text(shown["features"]) == f"{head} [SEP] Holds half a litre [SEP] "
    assert text_rich(shown["features"]).endswith("[button] < Prev [button_]\n Holds half a litre \n \n")
    assert text(shown["reviews"]) == head


def test_the_last_page_tells_the_score_in_the_original_only(hand_made_shop: Any) -> None:
    actions = [*MUG, "click[large]", "click[buy now]"]
    # The type, the attribute and the price are right, and "large" is like "size x-large": 3 of 4.
    original = text(pages(hand_made_shop("original"), *actions)[-1])
    assert "Your score (min 0.0, max 1.0) [SEP] 0.75 [SEP]" in original
    assert text(pages(hand_made_shop("clean"), *actions)[-1]) == (
        "Thank you for shopping with us! [SEP] Purchased [SEP] asin [SEP] B0000MUG01 [SEP] options [SEP] "
        '{"size": "large"}'
    )


@pytest.mark.parametrize("rules", ["original", "clean"])
def test_the_html_of_every_page_has_its_text(hand_made_shop: Any, html_text: Any, rules: str) -> None:
    shown = pages(hand_made_shop(rules), *WALK)
    assert {page.kind for page in shown} == {"search", "results", "item", "sub", "done"}
    for page in shown:
        assert html_text(html(page)) == text(page)


@pytest.mark.parametrize("rules", ["original", "clean"])
def test_every_button_of_the_html_posts_an_action_that_is_possible(hand_made_shop: Any, rules: str) -> None:
    shop = hand_made_shop(rules)
    goal, session = shop.catalog.goal(0), Session("0")
    for action in ["search[lamp]", "click[b000lamp02]", "click[søft]", "click[description]"]:
        session = act(shop, goal, session, action).session
        posted = Buttons(html(view(shop, goal, session))).actions
        assert len(posted) >= 2
        assert all(act(shop, goal, session, found).valid for found in posted), posted


class Buttons(HTMLParser):
    """The actions that a document can post."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.actions: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        if tag == "button" and given["name"] == "action":
            self.actions.append(given["value"])


def test_what_products_say_cannot_become_markup(hand_made_shop: Any) -> None:
    [*_, page] = pages(hand_made_shop("clean"), *MUG, "click[description]")
    assert "A mug for &lt;tea&gt; &amp; coffee." in html(page)
