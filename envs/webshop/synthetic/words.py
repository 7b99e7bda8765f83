"""The words that synthetic shops are made of: types of products, their options, brands and phrases.

They are data (``full.json``, ``simple.json``). A type takes on what its family has: the
qualities it may have ("gluten free"), its features ("a carrying case"), words, uses and options.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from importlib import resources

import msgspec

from rollgym.envs.arguments import check_choice

STYLES = ("full", "simple")


class Option(msgspec.Struct, frozen=True):
    """An option. Of values in one list, a product has at most one."""

    name: str
    say: tuple[str, ...]
    """Phrases for a value in an instruction."""
    values: tuple[str | tuple[str, ...], ...]


class _Type(msgspec.Struct, frozen=True):
    name: str
    price: tuple[int, int]
    form: str = "one"
    plural: str = ""
    qualities: tuple[str, ...] = msgspec.field(default=(), name="is")
    features: tuple[str, ...] = msgspec.field(default=(), name="has")
    options: tuple[str, ...] | None = None


class _Family(msgspec.Struct, frozen=True):
    types: tuple[_Type, ...]
    options: tuple[str, ...]
    qualities: tuple[str, ...] = msgspec.field(name="is")
    features: tuple[str, ...] = msgspec.field(default=(), name="has")
    words: tuple[str, ...] = ()
    uses: tuple[str, ...] = msgspec.field(default=(), name="for")
    notes: tuple[str, ...] = ()


class _Department(msgspec.Struct, frozen=True):
    path: str
    families: dict[str, _Family]


class _Brands(msgspec.Struct, frozen=True):
    starts: tuple[str, ...] = ()
    middles: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


class Bullets(msgspec.Struct, frozen=True):
    """Patterns of bullet points."""

    quality: tuple[str, ...] = ()
    feature: tuple[str, ...] = ()
    use: tuple[str, ...] = ()


class _File(msgspec.Struct, frozen=True):
    options: dict[str, Option]
    departments: dict[str, _Department]
    openers: tuple[str, ...]
    price_clauses: tuple[str, ...] = msgspec.field(name="price clauses")
    price_sentences: tuple[str, ...] = msgspec.field(default=(), name="price sentences")
    not_nouns: tuple[str, ...] = msgspec.field(default=(), name="not nouns")
    brands: _Brands = _Brands()
    lines: tuple[str, ...] = ()
    titles: tuple[str, ...] = ()
    descriptions: tuple[str, ...] = ()
    bullets: Bullets = Bullets()


class ProductType(msgspec.Struct, frozen=True, kw_only=True):
    """A type of product with all that is its family's."""

    name: str
    query: str
    """Its plural, which the shop searches by."""
    form: str
    """``one`` (a lamp), ``many`` (earbuds) or ``some`` (rice): its form in sentences."""
    category: str
    path: str
    price: tuple[int, int]
    qualities: tuple[str, ...]
    features: tuple[str, ...]
    """With their article: "a carrying case"; the attribute is `bare` of it."""
    words: tuple[str, ...]
    uses: tuple[str, ...]
    notes: tuple[str, ...]
    options: tuple[Option, ...]

    @property
    def attributes(self) -> tuple[str, ...]:
        """All that a product of the type may have."""
        return (*self.qualities, *map(bare, self.features))


class Vocabulary:
    """All words of a style."""

    def __init__(self, file: _File) -> None:
        self.departments = tuple(_departments(file))
        """The families of each department and the types of each family, the most common first."""
        self.types = tuple(kind for families in self.departments for family in families for kind in family)
        self.by_query = {kind.query: kind for kind in self.types}
        self.brands = tuple(_brands(file.brands))
        self.lines = file.lines
        self.titles = file.titles
        self.descriptions = file.descriptions
        self.bullets = file.bullets
        self.openers = file.openers
        self.price_clauses = file.price_clauses
        self.price_sentences = file.price_sentences
        self._not_nouns = frozenset(file.not_nouns)
        self.nouns = functools.cache(self._nouns)

    def _nouns(self, phrase: str) -> tuple[str, ...]:
        """The nouns of a phrase of this vocabulary, in order."""
        words = phrase.lower().split()
        verbs = {index + 1 for index, word in enumerate(words) if word == "to"}
        return tuple(
            word for index, word in enumerate(words) if index not in verbs and word not in self._not_nouns
        )


@functools.cache
def vocabulary(style: str) -> Vocabulary:
    """The words of a style: ``full``, or ``simple`` with few and short ones."""
    check_choice("style of shop", style, STYLES)
    text = resources.files(__package__).joinpath(f"{style}.json").read_bytes()
    return Vocabulary(msgspec.json.decode(text, type=_File))


@functools.cache
def bare(feature: str) -> str:
    """A feature without its article."""
    return feature.removeprefix("a ").removeprefix("an ")


def _departments(file: _File) -> Iterator[tuple[tuple[ProductType, ...], ...]]:
    for category, department in file.departments.items():
        yield tuple(
            tuple(
                _product_type(kind, family, category, f"{department.path} › {name}", file.options)
                for kind in family.types
            )
            for name, family in department.families.items()
        )


def _product_type(
    kind: _Type, family: _Family, category: str, path: str, options: dict[str, Option]
) -> ProductType:
    query = kind.plural or (_plural(kind.name) if kind.form == "one" else kind.name)
    names = family.options if kind.options is None else kind.options
    return ProductType(
        name=kind.name,
        query=query,
        form=kind.form,
        category=category,
        path=f"{path} › {query.title()}",
        price=kind.price,
        qualities=kind.qualities + family.qualities,
        features=kind.features + family.features,
        words=family.words,
        uses=family.uses,
        notes=family.notes,
        options=tuple(options[name] for name in names),
    )


def _plural(name: str) -> str:
    if name.endswith(("s", "x", "ch", "sh")):
        return f"{name}es"
    if name.endswith("y") and name[-2] not in "aeiou":
        return f"{name[:-1]}ies"
    return f"{name}s"


def _brands(parts: _Brands) -> Sequence[str]:
    return [a + b + c for a in parts.starts for b in parts.middles for c in parts.ends]
