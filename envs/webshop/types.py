"""Products, goals, and the catalog and search protocols of a shop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import msgspec

NO_BOUND = 1_000_000.0
"""The upper price of a goal that names none (the original's number)."""

GoalOptions: TypeAlias = dict[str, str] | tuple[str, ...]
"""Options of a goal: by name in a generated goal, bare values in a human one."""


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """One product, as the shop shows it and as the reward judges it."""

    asin: str
    title: str
    description: str = ""
    bullets: tuple[str, ...] = ()
    category: str
    """The department: ``beauty``, ``garden`` and so on."""
    query: str
    """The search term the product was collected under, lower case."""
    product_category: str
    """The path of categories, joined by `` › ``."""
    prices: tuple[float, ...]
    """One price, or the ends of a range."""
    price: float
    """Purchase price within ``prices``, drawn once when the catalog was built."""
    options: dict[str, tuple[str, ...]] = {}
    attributes: tuple[str, ...] = ()
    nouns: tuple[str, ...] = ()
    """The nouns of the title, lower case, in order, with repeats."""
    image: str = ""

    @property
    def price_text(self) -> str:
        """The price as pages show it."""
        return " to ".join(f"${price}" for price in self.prices)


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A goal: the instruction and the criteria of a purchase."""

    asin: str
    """A product that fulfils it; the type of a purchase is compared with its query, categories and nouns."""
    instruction: str
    attributes: tuple[str, ...]
    options: GoalOptions
    price_upper: float
    weight: float = 1.0
    human: bool = False


class HumanInstruction(msgspec.Struct, frozen=True):
    """An instruction written by a person: a record of ``items_human_ins.json``."""

    instruction: str
    instruction_attributes: tuple[str, ...] = ()
    instruction_options: tuple[str, ...] = ()
    """Values of options, without the options' names."""


class Catalog(Protocol):
    """The products and goals of a shop, numbered, the same in every process."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that is in it."""

    @property
    def goal_count(self) -> int:
        """Number of goals."""

    @property
    def splits(self) -> Mapping[str, Mapping[str, Sequence[int]]]:
        """Ways to split the goals (``original``, ``disjoint``): for each, goal numbers by split name."""

    def __len__(self) -> int:
        """Number of products."""

    def product(self, number: int) -> Product:
        """Product ``number``."""

    def number(self, asin: str) -> int | None:
        """Return the number of a product, None if unknown."""

    def goal(self, number: int) -> Goal:
        """Goal ``number``, in the catalog's order."""


class Search(Protocol):
    """Finds products by words."""

    @property
    def name(self) -> str:
        """The engine: ``lucene-exact`` or ``tantivy``."""

    def find(self, words: str, count: int = 50) -> list[tuple[int, float]]:
        """Product numbers with their scores, best first. Any text is a bag of words, no query language."""
