"""Writes a shop's files as a stream, with only numbers and names in memory."""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from rollgym.core.errors import UsageError
from rollgym.core.seeding import stable_digest
from rollgym.envs.webshop.catalog import store
from rollgym.envs.webshop.catalog.jsonfiles import Progress
from rollgym.envs.webshop.catalog.store import MANIFEST, ProductTable, ShopCatalog
from rollgym.envs.webshop.catalog.table import UINT32, Table, TableWriter, write_column, write_names
from rollgym.envs.webshop.types import Goal, Product

Products: TypeAlias = Iterable[Product] | Callable[[Path], Iterable[Product]]
"""Products, or a function that makes them, given a work folder that exists until the goals are made."""
Goals: TypeAlias = Iterable[Goal] | Callable[[ShopCatalog], Iterable[Goal]]
"""Goals, or a function that makes them from the products."""
Order: TypeAlias = Callable[[int], Sequence[int]]
"""Maps the number of goals to their order."""

ORIGINAL_FROM = 3000
"""With at least this many goals, the first 500 are for test and the next 1,000 for dev."""
EVERY = 1000
"""Records between two progress calls."""


def write_shop(
    folder: Path,
    products: Products,
    goals: Mapping[str, Goals],
    *,
    facts: Callable[[], Mapping[str, Any]],
    order: Order | None = None,
    total: int | None = None,
    search: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write all files, the manifest last, with the entries of ``facts``."""
    report = progress or _silent
    work = folder / "work"
    work.mkdir()
    product_stream = products(work) if callable(products) else products
    write_products(folder, _counted(product_stream, total, "products", report))
    shop = ShopCatalog(folder, {"goals": {}}, ProductTable(folder))
    sizes = {}
    for kind, source in goals.items():
        items = source(shop) if callable(source) else source
        sizes[kind] = write_goals(folder, kind, _counted(items, None, f"{kind} goals", report), shop, order)
    shutil.rmtree(work)
    if search:
        _write_search(folder, shop, report)
    report(0, None, "hashes")
    files = store.describe_files(folder)
    manifest = {
        "format": store.FORMAT,
        **facts(),
        "products": len(shop),
        "goals": sizes,
        "fingerprint": store.fingerprint_of(files),
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", "utf-8")


def write_products(folder: Path, products: Iterable[Product]) -> None:
    """Write products in their order; each asin once."""
    encoder, asins = msgspec.msgpack.Encoder(), list[bytes]()
    with TableWriter(folder, "products") as table:
        for product in products:
            asin = product.asin.encode()
            if not asin or asin.endswith(b"\0"):
                raise UsageError(f"Product {len(asins)} has an invalid asin: {product.asin!r}.")
            asins.append(asin)
            table.add(encoder.encode(product))
    if not asins:
        raise UsageError("A shop needs at least one product.")
    twice = write_names(folder, "products", asins)
    if twice is not None:
        raise UsageError(f"Two products have the same asin {twice!r}: each must have its own.")


def write_goals(
    folder: Path, kind: str, goals: Iterable[Goal], shop: ShopCatalog, order: Order | None
) -> dict[str, Any]:
    """Write goals and their splits; return the sizes for the manifest."""
    name, encoder, products = f"goals-{kind}", msgspec.msgpack.Encoder(), array("I")
    with TableWriter(folder, name) as table:
        for goal in goals:
            number = shop.number(goal.asin)
            if number is None:
                raise UsageError(f"Goal {len(table)} asks for {goal.asin!r}, which the shop does not have.")
            products.append(number)
            table.add(encoder.encode(goal))
    column = np.asarray(products, dtype=UINT32)
    if order is not None:
        column = _reorder(folder, name, column, order(len(column)))
    write_column(folder / f"{name}.products", column, UINT32)
    numbers, sizes = disjoint_split(column, shop)
    write_column(folder / f"{name}.disjoint", numbers, UINT32)
    return {"count": len(column), "original": original_split(len(column)), "disjoint": sizes}


def original_split(count: int) -> list[int]:
    """Number of goals for test, dev and train, from the first on."""
    test, dev = (500, 1000) if count >= ORIGINAL_FROM else (count // 10, count // 5)
    return [test, dev, count - test - dev]


def disjoint_split(products: npt.NDArray[Any], shop: ShopCatalog) -> tuple[npt.NDArray[Any], list[int]]:
    """Goal numbers for test, dev and train, about 10, 20 and 70 in a hundred, by their product.

    Products are ordered by a hash of their asin; the middle of a product's goals decides its split.
    """
    with_goals, counts = np.unique(products, return_counts=True)
    digests = [stable_digest("shop split", shop.product(int(number)).asin) for number in with_goals]
    rank = sorted(range(len(with_goals)), key=digests.__getitem__)
    ordered = counts[rank]
    middle = np.cumsum(ordered) - ordered / 2
    split_of_product = np.empty(len(with_goals), dtype=np.uint8)
    split_of_product[rank] = np.searchsorted([0.1 * len(products), 0.3 * len(products)], middle, side="right")
    split_of_goal = split_of_product[np.searchsorted(with_goals, products)]
    numbers = np.argsort(split_of_goal, kind="stable")
    return numbers, [int(np.count_nonzero(split_of_goal == index)) for index in range(3)]


def _reorder(folder: Path, name: str, column: npt.NDArray[Any], order: Sequence[int]) -> npt.NDArray[Any]:
    """Rewrite a table in another order, together with its product column."""
    table = Table(folder, name)
    with TableWriter(folder, f"{name}-ordered") as reordered:
        for number in order:
            reordered.add(bytes(table[number]))
    for ending in ("blob", "offsets"):
        (folder / f"{name}-ordered.{ending}").replace(folder / f"{name}.{ending}")
    return column[np.asarray(order, dtype=np.int64)]


def _write_search(folder: Path, shop: ShopCatalog, report: Progress) -> None:
    # Lazy: the search engines are optional packages.
    from rollgym.envs.webshop.search import ENGINES, LARGE, build_search, default_engines, document

    # A small shop can have both, for the price of a second.
    engines = ENGINES if len(shop) < LARGE else default_engines(len(shop))
    documents = (document(shop.product(number)) for number in range(len(shop)))
    # Only `lucene-exact` uses them, so a large shop skips the second pass.
    asins = (shop.product(number).asin for number in range(len(shop))) if len(shop) < LARGE else None
    build_search(
        folder / "search",
        _counted(documents, len(shop), "search index", report),
        engines=engines,
        names=asins,
    )


def _counted(items: Iterable[Any], total: int | None, phase: str, report: Progress) -> Iterator[Any]:
    done = 0
    for done, item in enumerate(items, 1):
        yield item
        if done % EVERY == 0:
            report(done, total, phase)
    report(done, done, phase)


def _silent(done: int, total: int | None, phase: str) -> None:
    """Progress callback that does nothing."""
