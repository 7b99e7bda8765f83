"""The original WebShop files, read as a stream: products, their attributes, and instructions.

    items_shuffle*.json     an array of products
    items_ins_v2*.json      by asin: attributes, and the program's instruction where there is one
    items_human_ins.json    by asin: instructions that people wrote (need not be there)

The attributes go to a mapped file first, since their order differs from the products'. An invalid
record is skipped and counted, or raises an error with ``strict``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollgym.core.errors import UsageError
from rollgym.core.seeding import derive_rng
from rollgym.envs.webshop.catalog.jsonfiles import Files, Progress, stream_array, stream_object
from rollgym.envs.webshop.catalog.table import Names, Table, TableWriter, write_names
from rollgym.envs.webshop.types import HumanInstruction, Product

NO_PRICE = 100.0
"""Price of a product without one."""
NO_ATTRIBUTES = ("DUMMY_ATTR",)
LONGEST_ASIN = 10
SHOWN = 5
"""Maximum number of bad records described in the report."""

Nouns = Callable[[str, str], tuple[str, ...]]
"""The nouns of a title, given the asin and the title."""


class Instructions(msgspec.Struct, frozen=True):
    """Instructions for a product in the files."""

    instruction: str | None = None
    instruction_attributes: tuple[str, ...] = ()
    human: tuple[HumanInstruction, ...] = ()


@dataclass(frozen=True)
class Record:
    """One product with its instructions."""

    product: Product
    instructions: Instructions


@dataclass
class Problems:
    """Problems of the files so far."""

    strict: bool = False
    bad: int = 0
    first: list[str] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)
    """Records that the original leaves out as well, by reason."""

    def add(self, where: str, problem: str) -> None:
        """Note a bad record, or raise with ``strict``."""
        sentence = f"{where}: {problem}"
        if self.strict:
            raise UsageError(f"{sentence}. Without --strict such records are left out.")
        self.bad += 1
        if len(self.first) < SHOWN:
            self.first.append(sentence)


class _Option(msgspec.Struct):
    value: str


class _Raw(msgspec.Struct):
    asin: str
    name: str
    category: str
    query: str
    product_category: str
    full_description: str | None = None
    small_description: list[str | None] | str | None = None
    pricing: str | None = None
    customization_options: dict[str, list[_Option] | None] | str | None = None
    images: list[str | None] | str | None = None


class _Attributes(msgspec.Struct):
    attributes: tuple[str, ...] | None = None
    instruction: str | None = None
    instruction_attributes: tuple[str, ...] | None = None


def read_records(
    files: Files,
    work: Path,
    *,
    nouns: Nouns,
    seed: int = 0,
    prices: Mapping[str, float] | None = None,
    problems: Problems | None = None,
    progress: Progress | None = None,
) -> Iterator[Record]:
    """Yield every product once, in the order of its file. ``work`` is an empty folder for lookup tables.

    A price between two ends is drawn from the seed and the asin, unless ``prices`` has the product.
    """
    problems = problems if problems is not None else Problems()
    find_attributes = _index_attributes(files.attributes, work, problems, progress)
    human = _read_human(files.human, problems) if files.human else {}
    asins: set[str] = set()
    num_products = 0
    for number, value in enumerate(stream_array(files.products, progress)):
        raw = _checked(value, _Raw, files.products.name, number, problems)
        if raw is None or not _is_new_product(raw.asin, asins, problems):
            continue
        asins.add(raw.asin)
        entry = find_attributes(raw.asin)
        try:
            listed_price = (prices or {}).get(raw.asin)
            product = make_product(raw, entry, nouns=nouns, seed=seed, listed_price=listed_price)
        except ValueError as error:
            problems.add(_where(files.products.name, number, raw.asin), str(error))
            continue
        num_products += 1
        yield Record(product, _instructions(entry, human.get(raw.asin, ())))
    if not num_products:
        raise UsageError(f"{files.products} holds no product that could be read.{_first_problem(problems)}")


def make_product(
    raw: _Raw, entry: _Attributes | None, *, nouns: Nouns, seed: int, listed_price: float | None
) -> Product:
    """Make a product of a record; a ValueError gives the reason if the record is invalid."""
    prices = parse_prices(raw.pricing)
    bullets = raw.small_description
    images = raw.images if isinstance(raw.images, list) else [raw.images]
    attribute_names = None if entry is None else entry.attributes
    return Product(
        asin=raw.asin,
        title=raw.name,
        description=raw.full_description or "",
        bullets=tuple(b or "" for b in bullets) if isinstance(bullets, list) else (bullets or "",),
        category=raw.category,
        query=raw.query.lower().strip(),
        product_category=raw.product_category,
        prices=prices,
        price=listed_price if listed_price is not None else draw_price(prices, raw.asin, seed),
        options=_options(raw),
        attributes=NO_ATTRIBUTES if attribute_names is None else attribute_names,
        nouns=nouns(raw.asin, raw.name),
        image=(images[0] if images else None) or "",
    )


def parse_prices(text: str | None) -> tuple[float, ...]:
    """Parse a price or the ends of a range, such as ``$19.99 - $27.99``."""
    if not text:
        return (NO_PRICE,)
    parts = [re.sub(r"[^\d.]", "", part) for part in text.split("$")[1:]]
    try:
        prices = tuple(float(part) for part in parts[:2])
    except ValueError:
        prices = ()
    if not prices:
        raise ValueError(f"pricing {text[:60]!r} holds no price such as $19.99")
    return prices


def draw_price(prices: tuple[float, ...], asin: str, seed: int) -> float:
    """Draw the purchase price; deterministic for a seed and asin."""
    if len(prices) == 1:
        return prices[0]
    return float(derive_rng("shop price", seed, asin).uniform(min(prices), max(prices)))


def _options(raw: _Raw) -> dict[str, tuple[str, ...]]:
    if not isinstance(raw.customization_options, dict):
        return {}
    return {
        name.lower(): tuple(option.value.strip().replace("/", " | ").lower() for option in values)
        for name, values in raw.customization_options.items()
        if values is not None
    }


def _instructions(entry: _Attributes | None, human: tuple[HumanInstruction, ...]) -> Instructions:
    if entry is None or entry.instruction is None:
        return Instructions(human=human)
    return Instructions(entry.instruction, entry.instruction_attributes or (), human)


def _is_new_product(asin: str, asins: set[str], problems: Problems) -> bool:
    if not asin or asin == "nan" or len(asin) > LONGEST_ASIN:
        problems.passed_over["no product id"] += 1
        return False
    if asin in asins:
        problems.passed_over["seen before"] += 1
        return False
    return True


def _index_attributes(
    path: Path, work: Path, problems: Problems, progress: Progress | None
) -> Callable[[str], _Attributes | None]:
    """Write the attributes of every product to a mapped file; return a lookup by asin."""
    encoder, keys = msgspec.msgpack.Encoder(), list[bytes]()
    with TableWriter(work, "attributes") as table:
        for number, (asin, value) in enumerate(stream_object(path, progress)):
            entry = _checked(value, _Attributes, path.name, number, problems, asin)
            if entry is not None and entry.instruction is not None and not entry.instruction_attributes:
                problems.add(_where(path.name, number, asin), "an instruction without instruction_attributes")
                entry.instruction = None
            if entry is not None:
                keys.append(asin.encode("utf-8", "surrogatepass"))
                table.add(encoder.encode(entry))
    write_names(work, "attributes", keys)
    names, records = Names(work, "attributes"), Table(work, "attributes")
    decoder = msgspec.msgpack.Decoder(_Attributes)

    def find(asin: str) -> _Attributes | None:
        number = names.find(asin)
        return None if number is None else decoder.decode(records[number])

    return find


def _read_human(path: Path, problems: Problems) -> dict[str, tuple[HumanInstruction, ...]]:
    """Instructions by asin: about ten thousand in the largest set, held in memory."""
    by_asin = {}
    for number, (asin, value) in enumerate(stream_object(path, None)):
        instructions = _checked(value, tuple[HumanInstruction, ...], path.name, number, problems, asin)
        if instructions is not None:
            by_asin[asin] = instructions
    return by_asin


def _checked(
    value: Any, kind: Any, file: str, number: int, problems: Problems, asin: str | None = None
) -> Any:
    """Convert a JSON value to a type; on failure note the problem and return None."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if asin is None and isinstance(value, dict):
            asin = value.get("asin")
        problems.add(_where(file, number, asin), str(error).replace(" - at `$", " at `").replace("`.", "`"))
        return None


def _where(file: str, number: int, asin: object) -> str:
    return f"{file}, record {number}" + (f" ({asin})" if isinstance(asin, str) and asin else "")


def _first_problem(problems: Problems) -> str:
    return f" The first bad record: {problems.first[0]}." if problems.first else ""
