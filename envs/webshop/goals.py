"""Goals, generated from a product's text or written by people, in the original's order.

The original draws price bounds unseeded, so that goal 0 asks for "lower than 30 dollars" in one process and
50 in another. Here a bound depends on the seed and the product alone.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rollgym.core.seeding import derive_rng
from rollgym.envs.webshop.types import NO_BOUND, Goal, HumanInstruction, Product

ORDER_SEED = 233
PRICE_STEP, PRICE_MOST = 10, 990
"""Bounds are multiples of the one, up to the other."""
CANDIDATES = 4


def price_bound(price: float, *parts: object) -> float:
    """The greatest price a customer of this product would pay, drawn by a seed made of ``parts``.

    Two of the next four multiples of 10 above the price are drawn, and the greater is the bound; there is
    none where fewer than two are left.
    """
    lowest = (math.floor(price / PRICE_STEP) + 1) * PRICE_STEP
    bounds = range(max(lowest, PRICE_STEP), PRICE_MOST + 1, PRICE_STEP)[:CANDIDATES]
    if len(bounds) < 2:
        return NO_BOUND
    indices = derive_rng("price bound", *parts).choice(len(bounds), size=2, replace=False)
    return float(bounds[int(indices.max())])


def price_words(bound: float) -> str:
    """Return the words for a bound in an instruction."""
    return "" if bound >= NO_BOUND else f", and price lower than {bound:.2f} dollars"


def combinations(product: Product) -> Iterator[dict[str, str]]:
    """Every way to choose one value of each option, names sorted; one empty choice without options."""
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def attribute_counts(products: Iterable[tuple[Product, Sequence[str]]]) -> Counter[str]:
    """In how many synthetic goals each attribute is wanted, from every product with its wanted attributes."""
    counts: Counter[str] = Counter()
    for product, attributes in products:
        goals = math.prod(len(values) for values in product.options.values())
        for attribute in attributes:
            counts[attribute] += goals
    return counts


def synthetic_goals(
    product: Product,
    instruction: str,
    attributes: Sequence[str],
    *,
    counts: Mapping[str, int],
    seed: object = 0,
) -> Iterator[Goal]:
    """A goal for each way to choose the product's options.

    Args:
        product: The product to find.
        instruction: The request, without options and price.
        attributes: Attributes in the instruction.
        counts: Goals per attribute (`attribute_counts`): a goal with rare ones weighs more.
        seed: Seed of the price bound, together with the asin.
    """
    bound = price_bound(product.price, seed, "synthetic", product.asin)
    weight = sum(1.0 / counts[name] for name in attributes) / len(attributes) if attributes else 1.0
    for options in combinations(product):
        option_text = ", and ".join(f"{name}: {value}" for name, value in options.items())
        yield Goal(
            asin=product.asin,
            instruction=f"{instruction}{' with ' if option_text else ''}{option_text}{price_words(bound)}",
            attributes=tuple(attributes),
            options=options,
            price_upper=bound,
            weight=weight,
        )


def human_goals(product: Product, texts: Iterable[HumanInstruction], *, seed: object = 0) -> Iterator[Goal]:
    """A goal for each instruction that a person wrote for the product, where it names an attribute."""
    for number, human in enumerate(texts):
        if not human.instruction_attributes:
            continue
        bound = price_bound(product.price, seed, "human", product.asin, number)
        yield Goal(
            asin=product.asin,
            instruction=human.instruction.strip(".") + price_words(bound),
            attributes=tuple(human.instruction_attributes),
            options=tuple(human.instruction_options),
            price_upper=bound,
            human=True,
        )


def original_order(count: int) -> list[int]:
    """The original's order of goals: which of ``count`` goals, numbered as they were made, comes when."""
    order = list(range(count))
    random.Random(ORDER_SEED).shuffle(order)
    return order
