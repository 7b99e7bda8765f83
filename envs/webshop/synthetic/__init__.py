"""Synthetic shops of any size: the default, without a download.

A product is a function of the style, the seed and its number alone, so a small shop is the beginning of a
large one. Two styles: ``full`` reads like a real shop, ``simple`` has few and short words for small policies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rollgym.core.errors import UsageError
from rollgym.core.seeding import derive_seed
from rollgym.envs.webshop.synthetic.full import full_product
from rollgym.envs.webshop.synthetic.goal_text import goal_texts
from rollgym.envs.webshop.synthetic.rng import endless_draws, numbered_draws
from rollgym.envs.webshop.synthetic.simple import simple_product
from rollgym.envs.webshop.synthetic.words import STYLES, vocabulary
from rollgym.envs.webshop.types import Catalog, Goal, Product

__all__ = ["GOALS_A_PRODUCT", "MOST_GOALS", "STYLES", "goal_count", "goals", "products"]

GOALS_A_PRODUCT = 6
MOST_GOALS = 20_000
"""Large shops have no more goals than this, spread over all their products."""

_LETTERS = "0123456789BCDFGHJKLMNPQRSTVWXZ"
_NAMES = len(_LETTERS) ** 8
# Shares no factor with the number of names, so a name comes back only after all others.
_STRIDE = 405_492_637_127


def products(size: int, seed: int, *, style: str = "full") -> Iterator[Product]:
    """The products of a shop, one at a time.

    Args:
        size: Number of products.
        seed: Another seed makes another shop.
        style: ``full`` or ``simple``.
    """
    words = vocabulary(style)
    make = simple_product if style == "simple" else full_product
    first = derive_seed("webshop asin", style, seed)
    for number, draw in enumerate(numbered_draws(size, "webshop product", style, seed)):
        yield make(_asin(first + number), words, draw)


def goals(catalog: Catalog, size: int, seed: int, *, style: str = "full") -> Iterator[Goal]:
    """The goals of a shop: first one of each product, then a second of each, and so on.

    Args:
        catalog: Holds what `products` made.
        size: Number of products that get goals.
        seed: Another seed makes other goals.
        style: The style of the products.
    """
    total = goal_count(size)
    num_chosen = min(size, total)
    numbers = [index * size // num_chosen for index in range(num_chosen)] if num_chosen else []
    rounds = math.ceil(total / num_chosen) if num_chosen else 0
    rows = [_product_goals(catalog.product(number), number, rounds, seed, style) for number in numbers]
    for index in range(total):
        yield rows[index % num_chosen][index // num_chosen]


def goal_count(size: int) -> int:
    """Return the number of goals of a shop with this many products."""
    return min(size * GOALS_A_PRODUCT, MOST_GOALS)


def _product_goals(product: Product, number: int, count: int, seed: int, style: str) -> list[Goal]:
    words = vocabulary(style)
    kind = words.by_query.get(product.query)
    if kind is None:
        raise UsageError(f"{product.asin} ({product.query!r}) is not a synthetic product in {style} style.")
    return goal_texts(product, kind, count, words, endless_draws("webshop goals", style, seed, number), style)


def _asin(number: int) -> str:
    """A name that no other number has: B0 and eight digits and consonants, so that none reads as a word."""
    remainder = number * _STRIDE % _NAMES
    letters = []
    for _ in range(8):
        remainder, digit = divmod(remainder, len(_LETTERS))
        letters.append(_LETTERS[digit])
    return "B0" + "".join(letters)
