"""Goals of synthetic shops, in many wordings (full style) or a few (simple style)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollgym.envs.webshop.synthetic.rng import Rng
from rollgym.envs.webshop.synthetic.words import ProductType, Vocabulary, bare
from rollgym.envs.webshop.types import Goal, Product

ATTRIBUTE_COUNTS = {"full": (1, 2, 2, 3), "simple": (1, 1, 2)}
BOUNDS = {"full": (0, 1, 2, 3), "simple": (0, 0, 1)}
"""A price bound is the next round number above the price, or this many steps further."""
STEPS = {"full": ((30, 5), (100, 10), (math.inf, 25)), "simple": ((math.inf, 10),)}
"""How round: below the one, a multiple of the other."""
FORGET = 0.15
"""The share of goals that leave one of several options open."""
_A = ("uni", "usb", "us", "uv", "eu", "one")
_AN = ("led", "hdmi")


def goal_texts(
    product: Product, kind: ProductType, count: int, words: Vocabulary, draw: Rng, style: str
) -> list[Goal]:
    """Return ``count`` different goals that the product fulfils.

    At most six: a simple product with two attributes and no options has no more.
    """
    goals: dict[tuple[object, ...], Goal] = {}
    while len(goals) < count:
        attributes = draw.some(product.attributes, draw.pick(ATTRIBUTE_COUNTS[style]))
        options = _options(product, draw)
        bound = _bound(product.price, style, draw)
        key = (*sorted(attributes), *sorted(options.items()), bound)
        text = write_instruction(kind, attributes, options, bound, words, draw, style)
        goal = Goal(
            asin=product.asin,
            instruction=text,
            attributes=tuple(attributes),
            options=options,
            price_upper=float(bound),
        )
        goals.setdefault(key, goal)
    return list(goals.values())


def _options(product: Product, draw: Rng) -> dict[str, str]:
    names = list(product.options)
    if len(names) > 1 and draw.chance(FORGET):
        names = draw.in_order(names, len(names) - 1)
    return {name: draw.pick(product.options[name]) for name in names}


def _bound(price: float, style: str, draw: Rng) -> int:
    step = next(step for limit, step in STEPS[style] if price < limit)
    return step * (int(price / step) + 1 + draw.pick(BOUNDS[style]))


def write_instruction(
    kind: ProductType,
    attributes: Sequence[str],
    options: dict[str, str],
    bound: int,
    words: Vocabulary,
    draw: Rng,
    style: str,
) -> str:
    """Return an instruction in a few phrasings (simple style), or as a person might write it (full style)."""
    opener = draw.pick(words.openers)
    if style == "simple":
        text = opener.format(f"{' '.join(attributes)} {kind.name}")
        text += "".join(f", {name} {value}" for name, value in options.items())
        return f"{text}, {words.price_clauses[0].format(bound)}"
    qualities = [text for text in attributes if text in kind.qualities]
    features = [text for text in kind.features if bare(text) in attributes]
    if draw.chance(0.3):
        text = opener.format(_with_article(kind, kind.name)) + _end(opener)
        text += _demands(kind, qualities, features) + _choices(options)
        return f"{text} {draw.pick(words.price_sentences).format(bound)}"
    text = opener.format(_noun_phrase(kind, qualities, features, draw))
    text += "".join(f", {phrase}" for phrase in _asked(kind, options, draw))
    if draw.chance(0.5):
        return f"{text}{_end(opener)} {draw.pick(words.price_sentences).format(bound)}"
    return f"{text}, {draw.pick(words.price_clauses).format(bound)}{_end(opener)}"


def _noun_phrase(kind: ProductType, qualities: list[str], features: list[str], draw: Rng) -> str:
    having = f" with {join(features)}" if features else ""
    if qualities and draw.chance(0.35):
        verb = "are" if kind.form == "many" else "is"
        also = f" and {'come' if kind.form == 'many' else 'comes'}{having}" if features else ""
        return f"{_with_article(kind, kind.name)} that {verb} {join(qualities)}{also}"
    return _with_article(kind, " ".join([", ".join(qualities), kind.name]).strip()) + having


def _demands(kind: ProductType, qualities: list[str], features: list[str]) -> str:
    it = "They" if kind.form == "many" else "It"
    if not qualities:
        return f" {it} should come with {join(features)}."
    also = f" and come with {join(features)}" if features else ""
    return f" {it} should be {join(qualities)}{also}."


def _choices(options: dict[str, str]) -> str:
    phrases = [f"the {name} should be {value}" for name, value in options.items()]
    return f" {join(phrases).capitalize()}." if phrases else ""


def _asked(kind: ProductType, options: dict[str, str], draw: Rng) -> list[str]:
    patterns = {option.name: option.say for option in kind.options}
    return [draw.pick(patterns[name]).format(value) for name, value in options.items()]


def _with_article(kind: ProductType, phrase: str) -> str:
    if kind.form != "one":
        return phrase if kind.form == "many" else f"some {phrase}"
    vowel = phrase[0] in "aeiou" and not phrase.startswith(_A)
    return f"{'an' if vowel or phrase.startswith(_AN) else 'a'} {phrase}"


def _end(opener: str) -> str:
    return "?" if opener.startswith(("Could", "Can", "Where")) else "."


def join(phrases: Sequence[str]) -> str:
    """Phrases as a sentence lists them."""
    if len(phrases) < 2:
        return "".join(phrases)
    return f"{', '.join(phrases[:-1])} and {phrases[-1]}"
