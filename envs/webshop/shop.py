"""A shop: products and goals, a search engine and rules, shared by all environments of a process."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

from rollgym.core.seeding import derive_rng
from rollgym.envs.webshop.rules import Rules, rules_called
from rollgym.envs.webshop.types import Catalog, Product, Search

if TYPE_CHECKING:
    from rollgym.envs.webshop.catalog.store import ShopCatalog

Listing: TypeAlias = dict[str, tuple[int, ...]]

RESULTS = 50
"""A search finds this many products at most."""


class Shop:
    """Immutable data shared by all sessions."""

    def __init__(self, catalog: Catalog, search: Search, rules: Rules) -> None:
        self.catalog = catalog
        self.search = search
        self.rules = rules

    def product(self, number: int) -> Product:
        """Product ``number`` of the catalog."""
        return self.catalog.product(number)

    def by_asin(self, asin: str) -> Product:
        """Return a product by asin; raises `KeyError` if unknown."""
        number = self.catalog.number(asin)
        if number is None:
            raise KeyError(f"the catalog has no product {asin!r}")
        return self.catalog.product(number)

    def find(self, words: tuple[str, ...]) -> tuple[int, ...]:
        """Numbers of the products that a search for these words shows, best first."""
        if self.rules.special_searches and words[0] in ("<r>", "<c>", "<q>"):
            return self._special(words[0], words[1:])
        return tuple(number for number, _ in self.search.find(" ".join(words), RESULTS))

    def _special(self, kind: str, words: tuple[str, ...]) -> tuple[int, ...]:
        if kind == "<r>":
            count = len(self.catalog)
            rng = derive_rng("random search", self.catalog.fingerprint, *words)
            return tuple(map(int, rng.choice(count, size=min(RESULTS, count), replace=False)))
        departments, queries = self._listings
        if kind == "<c>":
            return departments.get(words[0].strip() if words else "", ())
        return queries.get(" ".join(words).strip(), ())

    @functools.cached_property
    def _listings(self) -> tuple[Listing, Listing]:
        """Product numbers by department and by search term; built from the catalog on first use."""
        departments: dict[str, list[int]] = {}
        queries: dict[str, list[int]] = {}
        for number in range(len(self.catalog)):
            product = self.catalog.product(number)
            departments.setdefault(product.category, []).append(number)
            queries.setdefault(product.query, []).append(number)
        by_department, by_query = (
            {name: tuple(numbers) for name, numbers in listing.items()} for listing in (departments, queries)
        )
        return by_department, by_query


def open_shop(name: str, *, rules: str, search: str, goals: str) -> Shop:
    """Open a shop by name or folder; its files are opened once per process and shared."""
    from rollgym.envs.webshop.catalog.build import resolve_shop
    from rollgym.envs.webshop.catalog.store import open_shop as open_store

    rule_set = rules_called(rules)
    return _shop(open_store(resolve_shop(name), goals), rule_set, search)


@functools.lru_cache(maxsize=16)
def _shop(catalog: ShopCatalog, rules: Rules, search: str) -> Shop:
    from rollgym.envs.webshop.search import open_search

    return Shop(catalog, open_search(catalog.folder / "search", search), rules)
