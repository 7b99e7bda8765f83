"""A product of a synthetic shop in simple style: few short words, prices in whole dollars."""

from __future__ import annotations

from rollgym.envs.webshop.synthetic.full import choose_options
from rollgym.envs.webshop.synthetic.rng import Rng
from rollgym.envs.webshop.synthetic.words import Vocabulary
from rollgym.envs.webshop.types import Product

STEP = 5
"""Prices are multiples of this, as the bounds of every type are."""
OPTION_COUNTS = (0, 1, 1, 1, 1, 2)


def simple_product(asin: str, words: Vocabulary, draw: Rng) -> Product:
    """Make a product from the draws; its title names all its attributes."""
    kind = draw.pick_early(draw.pick_early(draw.pick(words.departments)))
    qualities = tuple(draw.some(kind.qualities, 2 + draw.below(2)))
    title = f"{' '.join(qualities)} {kind.name}"
    low, high = kind.price
    price = float(low + STEP * draw.below((high - low) // STEP + 1))
    return Product(
        asin=asin,
        title=title,
        bullets=(f"{kind.name}: {', '.join(qualities)}",),
        category=kind.category,
        query=kind.query,
        product_category=kind.path,
        prices=(price,),
        price=price,
        options=choose_options(kind, draw.pick(OPTION_COUNTS), 4, draw),
        attributes=qualities,
        nouns=words.nouns(kind.name),
    )
