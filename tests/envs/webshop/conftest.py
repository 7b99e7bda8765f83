"""What the WebShop tests share: a catalog held in memory, a shop made by hand, and the original's data."""

import functools
import gzip
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rollgym.envs.webshop import goals as goal_making
from rollgym.envs.webshop.catalog.build import build_shop, resolve_shop
from rollgym.envs.webshop.catalog.jsonfiles import find_files
from rollgym.envs.webshop.catalog.records import Record, read_records
from rollgym.envs.webshop.pages import SEPARATOR
from rollgym.envs.webshop.rules import RULES
from rollgym.envs.webshop.search import build_search, document, open_search
from rollgym.envs.webshop.shop import Shop
from rollgym.envs.webshop.types import Goal, Product, Search


class MemoryCatalogue:
    """Products and goals in lists."""

    fingerprint = "in memory"
    splits: Mapping[str, Mapping[str, Sequence[int]]] = {}

    def __init__(self, products: Sequence[Product], goals: Sequence[Goal]) -> None:
        self.products, self.goals = list(products), list(goals)
        self.numbers = {product.asin: number for number, product in enumerate(products)}

    @property
    def goal_count(self) -> int:
        return len(self.goals)

    def __len__(self) -> int:
        return len(self.products)

    def product(self, number: int) -> Product:
        return self.products[number]

    def number(self, asin: str) -> int | None:
        return self.numbers.get(asin)

    def goal(self, number: int) -> Goal:
        return self.goals[number]


class WordSearch:
    """Finds the products with the most of the words in their title, in catalog order where equal."""

    name = "words"

    def __init__(self, products: Sequence[Product]) -> None:
        self.titles = [set(product.title.lower().split()) for product in products]

    def find(self, words: str, count: int = 50) -> list[tuple[int, float]]:
        wanted = set(words.split())
        found = [(number, float(len(wanted & title))) for number, title in enumerate(self.titles)]
        return sorted((hit for hit in found if hit[1]), key=lambda hit: (-hit[1], hit[0]))[:count]


def _product(asin: str, title: str, **more: Any) -> Product:
    given = {
        "category": "garden",
        "query": "mugs",
        "product_category": "Home › Kitchen › Mugs",
        "prices": (12.5,),
        "price": 12.5,
        "nouns": tuple(title.lower().split()),
    }
    return Product(asin=asin, title=title, **(given | more))


def hand_made() -> list[Product]:
    """Three products one can check by hand, and eleven that only fill the pages."""
    mug = _product(
        "B0000MUG01",
        "Blue Mug",
        description="A mug for <tea> & coffee.",
        bullets=("Holds half a litre ", ""),
        options={"size": ("large", "x-large"), "color": ("navy blue", "rectangular")},
        attributes=("dishwasher safe", "hand made"),
    )
    lamp = _product(
        "B000LAMP02",
        "Desk Lamp",
        query="lamps",
        product_category="Electronics › Lamps",
        prices=(20.0, 30.0),
        price=24.0,
        options={"light": ("warm", "cold", "buy now"), "cable": ("cold", 'a "long" one', "søft")},
        attributes=("energy saving",),
    )
    bare_mug = _product("B0000MUG03", "Plain Mug", attributes=("hand made",), prices=(8.0,), price=8.0)
    filler = [_product(f"B000FILL{n:02}", f"Mug Number {n}") for n in range(11)]
    return [mug, lamp, bare_mug, *filler]


GOALS = [
    Goal(
        asin="B0000MUG01",
        instruction="Find me a hand made mug with color: rectangular, and size: x-large",
        attributes=("hand made",),
        options={"color": "rectangular", "size": "x-large"},
        price_upper=20.0,
    ),
    Goal(
        asin="B000LAMP02",
        instruction="Find me a lamp with cold light and a cold cable",
        attributes=("energy saving",),
        options={"light": "cold", "cable": "cold"},
        price_upper=40.0,
    ),
]


@pytest.fixture
def hand_made_shop() -> Callable[[str], Shop]:
    """The hand-made products under the rules of a name."""
    products = hand_made()
    catalog = MemoryCatalogue(products, GOALS)
    return lambda rules: Shop(catalog, WordSearch(products), RULES[rules])


def _hand_made_goals() -> list[Goal]:
    wanted = [(product, ("hand made",)) for product in hand_made()]
    counts = goal_making.attribute_counts(wanted)
    return [
        goal
        for product, attributes in wanted
        for goal in goal_making.synthetic_goals(
            product, f"Find me {product.title}", attributes, counts=counts
        )
    ]


@pytest.fixture(scope="session")
def shop_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hand-made products as a shop on disk, with a goal for each way to choose their options."""
    folder = tmp_path_factory.mktemp("shop") / "hand-made"
    return str(build_shop(folder, hand_made(), _hand_made_goals()))


@pytest.fixture(scope="session")
def synthetic_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A synthetic shop of 300 products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLGYM_CACHE", str(tmp_path_factory.mktemp("cache")))
        return str(resolve_shop("synthetic:300"))


class Walk(HTMLParser):
    """The text of a document by the original's rule: node by node, without what is in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.nodes: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "input", "img"):
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.inside.pop() == tag

    def handle_data(self, data: str) -> None:
        hidden = {"style", "script", "head", "title"} & {*self.inside[-1:]}
        line_break = "\n" in data and not data.strip(" \t\n\f\r")
        if self.inside and not hidden and not line_break:
            self.nodes.append(data)


@pytest.fixture
def html_text() -> Callable[[str], str]:
    """The ``text`` observation, by parsing HTML."""

    def read(document: str) -> str:
        walk = Walk()
        walk.feed(document)
        walk.close()
        assert walk.inside == []
        return SEPARATOR.join(node.strip() for node in walk.nodes)

    return read


class Original:
    """The original's 1,000 products, with the nouns and prices of the golden run, and its golden files."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self._work = folder, work

    def golden(self, name: str) -> Any:
        path = self.folder / "golden" / name
        return json.loads(path.read_text(encoding="utf-8"))

    def golden_lines(self, name: str) -> list[dict[str, Any]]:
        with gzip.open(self.folder / "golden" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    @functools.cached_property
    def records(self) -> list[Record]:
        nouns, prices = self.golden("title_nouns.json"), self.golden("product_prices.json")
        work = self._work / "records"
        work.mkdir()
        files = find_files(self.folder)
        return list(read_records(files, work, nouns=lambda asin, _: tuple(nouns[asin]), prices=prices))

    @functools.cached_property
    def goals(self) -> list[Goal]:
        made = list(self._made_goals())
        return [made[place] for place in goal_making.original_order(len(made))]

    def _made_goals(self) -> Iterator[Goal]:
        asked = [r for r in self.records if r.instructions.instruction is not None]
        wanted = ((r.product, r.instructions.instruction_attributes) for r in asked)
        counts = goal_making.attribute_counts(wanted)
        for r in asked:
            said = r.instructions
            yield from goal_making.synthetic_goals(
                r.product, said.instruction or "", said.instruction_attributes, counts=counts
            )

    @functools.cached_property
    def catalog(self) -> MemoryCatalogue:
        return MemoryCatalogue([record.product for record in self.records], self.goals)

    @functools.cached_property
    def search(self) -> Search:
        folder = self._work / "search"
        products = self.catalog.products
        build_search(folder, map(document, products), names=[product.asin for product in products])
        return open_search(folder, "lucene-exact")

    def shop(self, rules: str) -> Shop:
        return Shop(self.catalog, self.search, RULES[rules])


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The original's data, where it is."""
    folder = os.environ.get("ROLLGYM_TEST_DATA")
    if not folder:
        pytest.skip("ROLLGYM_TEST_DATA is not set: no original data to compare with")
    return Original(Path(folder) / "webshop", tmp_path_factory.mktemp("original"))
