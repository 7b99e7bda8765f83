"""Imports the original WebShop files as a shop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollgym.core.errors import UsageError
from rollgym.core.seeding import file_hash
from rollgym.envs.webshop import goals as rules
from rollgym.envs.webshop.catalog.build import build_shop, import_folder
from rollgym.envs.webshop.catalog.jsonfiles import (
    Files,
    Progress,
    find_files,
    read_noun_file,
    read_price_file,
)
from rollgym.envs.webshop.catalog.nouns import Tagger
from rollgym.envs.webshop.catalog.records import Instructions, Problems, Record, read_records
from rollgym.envs.webshop.catalog.store import ShopCatalog
from rollgym.envs.webshop.catalog.table import Table, TableWriter
from rollgym.envs.webshop.catalog.writer import Goals
from rollgym.envs.webshop.types import Goal, Product

KINDS = {"synthetic": ("synthetic",), "human": ("human",), "both": ("synthetic", "human")}
_Noted = tuple[int, Instructions]


@dataclass(frozen=True)
class Import:
    """Result of an import with the problems of the files."""

    folder: Path
    name: str
    problems: Problems


def import_shop(
    path: str | Path,
    *,
    name: str | None = None,
    prices: Path | None = None,
    nouns: Path | None = None,
    goals: str = "both",
    seed: int = 0,
    strict: bool = False,
    search: bool = True,
    progress: Progress | None = None,
) -> Import:
    """Import the files in a folder as the shop ``name``; it replaces an earlier import of that name.

    Args:
        path: The folder, or its items_shuffle file.
        name: Name for `resolve_shop`; by default ``webshop`` plus the ending of the file's name.
        prices: A JSON file of prices by asin, for products whose price is a range (or any other).
        nouns: A JSON file of lists of nouns by asin, instead of a tagger.
        goals: ``synthetic``, ``human`` or ``both``.
        seed: Seed of the prices within ranges and of the goals' price bounds.
        strict: Stop at the first bad record instead of skipping it.
        search: False skips the search index.
        progress: Progress callback.
    """
    if goals not in KINDS:
        raise UsageError(f"goals must be one of {', '.join(KINDS)}, not {goals!r}.")
    files = find_files(path)
    if goals == "human" and files.human is None:
        raise UsageError(f"{files.products.parent} has no items_human_ins.json, so there are no human goals.")
    name = name or "webshop" + files.products.stem.removeprefix("items_shuffle").replace("_", "-")
    target = import_folder(name)
    tagger = Tagger(read_noun_file(nouns) if nouns else None)
    listed_prices = read_price_file(prices) if prices else {}
    problems = Problems(strict=strict)

    def facts() -> dict[str, Any]:
        return {
            "name": name,
            "prices": "file, else drawn" if listed_prices else "drawn",
            "source": {path.name: file_hash(path) for path in _paths(files)},
            "left_out": {"bad": problems.bad, **problems.passed_over},
        }

    notes = _Notes()

    def products(work: Path) -> Iterator[Product]:
        records = read_records(
            files, work, nouns=tagger, seed=seed, prices=listed_prices, problems=problems, progress=progress
        )
        return notes.taken(records, work)

    build_shop(
        target,
        products,
        _goals(notes, KINDS[goals] if files.human else ("synthetic",), seed),
        kind="imported",
        seed=seed,
        tagger=tagger.name,
        order=rules.original_order,
        facts=facts,
        search=search,
        progress=progress,
    )
    return Import(target, name, problems)


def _paths(files: Files) -> list[Path]:
    return [path for path in (files.products, files.attributes, files.human) if path is not None]


class _Notes:
    """Stores the instructions in a file while the products are streamed."""

    def taken(self, records: Iterator[Record], folder: Path) -> Iterator[Product]:
        """Yield the products of the records; write the instructions to a file in ``folder``."""
        self._folder = folder
        encoder = msgspec.msgpack.Encoder()
        with TableWriter(folder, "instructions") as table:
            for number, record in enumerate(records):
                if record.instructions.instruction is not None or record.instructions.human:
                    table.add(encoder.encode((number, record.instructions)))
                yield record.product

    def of(self, shop: ShopCatalog) -> Iterator[tuple[Product, Instructions]]:
        """Yield every product with instructions, and its instructions."""
        table, decoder = Table(self._folder, "instructions"), msgspec.msgpack.Decoder(_Noted)
        for index in range(len(table)):
            number, instructions = decoder.decode(table[index])
            yield shop.product(number), instructions


def _goals(notes: _Notes, kinds: tuple[str, ...], seed: int) -> Mapping[str, Goals]:
    def synthetic(shop: ShopCatalog) -> Iterator[Goal]:
        counts = rules.attribute_counts(
            (p, i.instruction_attributes) for p, i in notes.of(shop) if i.instruction
        )
        for product, instructions in notes.of(shop):
            if instructions.instruction:
                text, attributes = instructions.instruction, instructions.instruction_attributes
                yield from rules.synthetic_goals(product, text, attributes, counts=counts, seed=seed)

    def human(shop: ShopCatalog) -> Iterator[Goal]:
        for product, instructions in notes.of(shop):
            yield from rules.human_goals(product, instructions.human, seed=seed)

    makers: dict[str, Goals] = {"synthetic": synthetic, "human": human}
    return {kind: makers[kind] for kind in kinds}
