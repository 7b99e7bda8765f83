"""How actions are read."""

import pytest

from rollgym.envs.webshop.actions import Action, parse
from rollgym.envs.webshop.rules import CLEAN, ORIGINAL


@pytest.mark.parametrize("rules", [ORIGINAL, CLEAN])
def test_both_rule_sets_read_plain_actions(rules) -> None:
    assert parse("search[Red Shirt]", rules) == Action("search", "red shirt")
    assert parse("click[B09QCP4579]", rules) == Action("click", "b09qcp4579")
    assert parse("click[< Prev]", rules) == Action("click", "< prev")


@pytest.mark.parametrize("rules", [ORIGINAL, CLEAN])
@pytest.mark.parametrize(
    "text", ["", "buy now", "think[hmm]", "click", "click[]", "search[]", "[large]", "click large", "]["]
)
def test_what_is_no_action(rules, text: str) -> None:
    assert parse(text, rules) is None


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("CLICK[Buy Now]", Action("click", "buy now")),
        (" click[large] ", Action("click", "large")),
        ("`click[large]`.", Action("click", "large")),
        ("click [large]", Action("click", "large")),
        ("click[size [us]: 7]", Action("click", "size [us]: 7")),
        ("search[two\nlines]", Action("search", "two lines")),
        ("I will click[large]", None),
        ("click[large] now", None),
    ],
)
def test_the_original_is_strict_where_clean_rules_are_forgiving(text: str, clean: Action | None) -> None:
    assert parse(text, CLEAN) == clean
    if text != "click[large] now":
        assert parse(text, ORIGINAL) is None


def test_the_original_ignores_what_follows_the_bracket() -> None:
    assert parse("click[large] now", ORIGINAL) == Action("click", "large")
    assert parse("click[large]\nclick[small]", ORIGINAL) == Action("click", "large")


def test_the_original_takes_spaces_as_they_are() -> None:
    assert parse("search[a  b ]", ORIGINAL) == Action("search", "a  b ")
    assert parse("search[a  b ]", CLEAN) == Action("search", "a b")


def test_an_action_is_written_as_it_is_read() -> None:
    assert str(Action("click", "buy now")) == "click[buy now]"
