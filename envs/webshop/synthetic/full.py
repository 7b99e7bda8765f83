"""A product of a synthetic shop in full style: title, description, bullet points, options and price."""

from __future__ import annotations

import functools
from string import Formatter
from typing import NamedTuple

from rollgym.envs.webshop.synthetic.rng import Rng
from rollgym.envs.webshop.synthetic.words import Option, ProductType, Vocabulary, bare
from rollgym.envs.webshop.types import Product

OPTION_COUNTS = (0, 0, 1, 1, 1, 1, 2, 2, 2, 3)
"""Weights of the number of options; fewer if the type has fewer."""
ENDINGS = (0.99, 0.99, 0.49, 0.95, 0.0)
RANGES = 0.1
"""The share of products with two prices."""
TOLD = 0.75
"""Fraction of attributes mentioned in bullet points."""
_SPEAK = {"one": ("this", "is", "comes"), "many": ("these", "are", "come"), "some": ("this", "is", "comes")}
_CAPITALS = frozenset(("b", "bpa", "c", "e", "gmo", "gps", "hdmi", "led", "tv", "usb", "uv"))
_SMALL = frozenset(("a", "an", "and", "for", "in", "the", "to", "with"))


class _Draft(NamedTuple):
    """The choices that the texts of a product share."""

    kind: ProductType
    phrases: dict[str, str]
    qualities: list[str]
    features: list[str]


def full_product(asin: str, words: Vocabulary, draw: Rng) -> Product:
    """The product that the draws make."""
    kind = draw.pick_early(draw.pick_early(draw.pick(words.departments)))
    qualities = draw.some(kind.qualities, 2 + draw.below(3))
    features = draw.some(kind.features, 1 + draw.below(3))
    phrases = {
        "brand": draw.pick(words.brands),
        "line": draw.pick(words.lines),
        "word": draw.pick(kind.words),
        "use": draw.pick(kind.uses),
        "type": kind.name,
        "quality": qualities[0],
        "quality2": qualities[1],
        "feature": bare(features[0]),
    }
    draft = _Draft(kind, phrases, qualities, features)
    title, nouns = _title(draw.pick(words.titles), phrases, words)
    prices, price = _prices(kind, draw)
    return Product(
        asin=asin,
        title=title,
        description=_description(draft, words, draw),
        bullets=_bullets(draft, words, draw),
        category=kind.category,
        query=kind.query,
        product_category=kind.path,
        prices=prices,
        price=price,
        options=choose_options(kind, draw.pick(OPTION_COUNTS), 5, draw),
        attributes=(*qualities, *map(bare, features)),
        nouns=nouns,
    )


def choose_options(kind: ProductType, count: int, spread: int, draw: Rng) -> dict[str, tuple[str, ...]]:
    """Choose ``count`` options, each with 2 to ``spread`` + 1 values."""
    options = draw.in_order(kind.options, count)
    return {option.name: _values(option, 2 + draw.below(spread), draw) for option in options}


def _values(option: Option, count: int, draw: Rng) -> tuple[str, ...]:
    values = draw.in_order(option.values, count)
    return tuple(value if isinstance(value, str) else draw.pick(value) for value in values)


def _title(pattern: str, phrases: dict[str, str], words: Vocabulary) -> tuple[str, tuple[str, ...]]:
    phrases = {name: phrases[name] for name in _fields(pattern)}
    title = pattern.format_map({name: headline(phrase) for name, phrase in phrases.items()})
    return title, tuple(noun for phrase in phrases.values() for noun in words.nouns(phrase))


def _description(draft: _Draft, words: Vocabulary, draw: Rng) -> str:
    this, verb, comes = _SPEAK[draft.kind.form]
    notes = draw.some(draft.kind.notes, 2)
    fields = draft.phrases | {
        "this": this,
        "This": this.capitalize(),
        "is": verb,
        "comes": comes,
        "type": spell(draft.kind.name),
        "quality": spell(draw.pick(draft.qualities)),
        "feature": spell(draw.pick(draft.features)),
        "note": notes[0],
        "note2": notes[1],
    }
    text = draw.pick(words.descriptions).format_map(fields)
    return text[0].upper() + text[1:]


def _bullets(draft: _Draft, words: Vocabulary, draw: Rng) -> tuple[str, ...]:
    patterns = words.bullets
    told_qualities = [quality for quality in draft.qualities if draw.chance(TOLD)]
    told_features = [feature for feature in draft.features if draw.chance(TOLD)]
    fields = {"type": spell(draft.kind.name), "word": draft.phrases["word"]}
    lines = [draw.pick(patterns.use).format(draft.phrases["use"])]
    lines += [draw.pick(patterns.quality).format(spell(quality), **fields) for quality in told_qualities]
    lines += [draw.pick(patterns.feature).format(spell(feature)) for feature in told_features]
    lines = [line[0].upper() + line[1:] for line in lines]
    return tuple(draw.some(lines, len(lines)))


def _prices(kind: ProductType, draw: Rng) -> tuple[tuple[float, ...], float]:
    """The prices as shown, and the price to pay."""
    low = round(int(draw.between(*kind.price)) + draw.pick(ENDINGS), 2)
    if not draw.chance(RANGES):
        return (low,), low
    high = round(int(low * (1.2 + 0.1 * draw.below(6))) + 0.99, 2)
    return (low, high), round(low + (high - low) * 0.01 * draw.below(101), 2)


@functools.cache
def headline(phrase: str) -> str:
    """A phrase as titles write it."""
    words = spell(phrase).split()
    return " ".join(word if word in _SMALL else word[0].upper() + word[1:] for word in words)


@functools.cache
def spell(phrase: str) -> str:
    """A phrase with its abbreviations in capitals."""
    return " ".join(word.upper() if word in _CAPITALS else word for word in phrase.split())


@functools.cache
def _fields(pattern: str) -> tuple[str, ...]:
    return tuple(name for _, name, _, _ in Formatter().parse(pattern) if name)
