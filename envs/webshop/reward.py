"""Reward of a purchase: its type, attributes, options and price compared with the goal."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollgym.core.errors import MissingExtra
from rollgym.envs.webshop.colors import COLORS, color_in
from rollgym.envs.webshop.rules import Rules
from rollgym.envs.webshop.types import Goal, GoalOptions, Product

LIKE = 85
"""Two texts are alike when their token-set ratio, rounded, is above this."""
_LATIN1 = dict.fromkeys(range(128, 256))
"""thefuzz drops these before it compares, and no other letters beyond ASCII."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A reward and its parts."""

    reward: float
    type: float
    """1 for the right kind of product, less where its query, category and title are far from the goal's."""
    query_match: bool
    category_match: bool
    title_score: float
    attributes: int
    """Number of the goal's attributes that the product has."""
    attributes_wanted: int
    options: int
    """Number of the goal's options that were chosen."""
    options_wanted: int
    price_ok: bool

    def parts(self) -> dict[str, Any]:
        """The parts under the original's names: each ``r_`` is a share fulfilled, each ``w_`` its weight."""
        total = self.attributes_wanted + self.options_wanted + 1
        parts: dict[str, Any] = {
            "r_type": self.type,
            "r_att": self.attributes / self.attributes_wanted if self.attributes_wanted else 1.0,
            "w_att": self.attributes_wanted / total,
            "query_match": self.query_match,
            "category_match": self.category_match,
            "title_score": self.title_score,
        }
        if self.options_wanted:
            parts["r_option"] = self.options / self.options_wanted
            parts["w_option"] = self.options_wanted / total
        return {**parts, "r_price": self.price_ok, "w_price": 1 / total}


def score(product: Product, target: Product, goal: Goal, chosen: Mapping[str, str], rules: Rules) -> Score:
    """Judge the purchase of a product with the chosen options; ``target`` is the goal's own product."""
    query = product.query == target.query
    category = len(_categories(product) & _categories(target)) >= 2
    title = _title_score(product.nouns, target.nouns)
    type_score = _type_score(query or category, title)
    attributes = sum(_has_attribute(product, wanted) for wanted in goal.attributes)
    judge = _like_options if rules.fuzzy_options else _equal_options
    options = judge(goal.options, chosen)
    affordable = product.price <= goal.price_upper
    total = len(goal.attributes) + len(goal.options) + 1
    return Score(
        reward=type_score * ((attributes + options + affordable) / total),
        type=type_score,
        query_match=query,
        category_match=category,
        title_score=title,
        attributes=attributes,
        attributes_wanted=len(goal.attributes),
        options=options,
        options_wanted=len(goal.options),
        price_ok=affordable,
    )


def _categories(product: Product) -> set[str]:
    return {part.strip() for part in product.product_category.split("›")}


def _title_score(nouns: Iterable[str], wanted: tuple[str, ...]) -> float:
    return len(set(nouns) & set(wanted)) / len(wanted) if wanted else 0.2


def _type_score(matches: bool, title: float) -> float:
    """A title with nothing in common counts more than an equal query or category: it makes the type 0."""
    if title < 0.1:
        return 0.1 if title else 0.0
    return 1.0 if matches or title > 0.2 else 0.5


def _has_attribute(product: Product, wanted: str) -> bool:
    return (
        any(alike(attribute, wanted) for attribute in product.attributes)
        or wanted in product.title.lower()
        or wanted in " ".join(product.bullets).lower()
        or wanted in product.description.lower()
    )


def _like_options(wanted: GoalOptions, chosen: Mapping[str, str]) -> int:
    """The original's: any chosen value that is like the goal's counts, in any option.

    A goal with named options is compared as the pair's text, and a color word replaces the pair only
    where it *is* the name or the value; a chosen value is replaced by any color word within it.
    """
    if isinstance(wanted, dict):
        texts = [next((c for c in COLORS if c in pair), str(pair)) for pair in wanted.items()]
    else:
        texts = [color_in(value) for value in wanted]
    values = [color_in(value) for value in chosen.values()]
    return sum(any(alike(value, text) for value in values) for text in texts)


def _equal_options(wanted: GoalOptions, chosen: Mapping[str, str]) -> int:
    """Name and value must be the goal's; where the goal has no names, the value of some option."""
    if isinstance(wanted, dict):
        return sum(_normalize(chosen.get(name, "")) == _normalize(value) for name, value in wanted.items())
    values = {_normalize(value) for value in chosen.values()}
    return sum(_normalize(value) in values for value in wanted)


def _normalize(value: str) -> str:
    """Normalize case and spaces of a value as in the catalog."""
    return " ".join(value.lower().replace("/", " | ").split())


@functools.lru_cache(maxsize=65_536)
def alike(text: str, other_text: str) -> bool:
    """Return whether the words of two texts are alike, as ``thefuzz.fuzz.token_set_ratio`` measures it."""
    ratio, process = _rapidfuzz()
    processed, other_processed = process(text.translate(_LATIN1)), process(other_text.translate(_LATIN1))
    return bool(round(ratio(processed, other_processed)) > LIKE)


@functools.lru_cache(maxsize=1)
def _rapidfuzz() -> tuple[Any, Any]:
    try:
        from rapidfuzz import fuzz, utils
    except ImportError:
        raise MissingExtra("The reward of WebShop", "webshop") from None
    return fuzz.token_set_ratio, utils.default_process
