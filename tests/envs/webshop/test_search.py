"""Building and opening both engines, hostile queries, and Lucene's own results."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import MissingExtra, UnknownName, UsageError
from rollgym.envs.webshop import search as search_module
from rollgym.envs.webshop.search import ENGINES, build_search, default_engines, document, open_search
from rollgym.envs.webshop.types import Product, Search

TEXTS = ["red cotton shirt", "blue cotton shirt", "red shoe", "usb cable 10 ft", "café mug"]
HOSTILE = [
    'size: 10" (a+b',
    "women's \"red shirt",
    "a:b AND OR NOT red",
    "-red +shirt *",
    "* *:* ?",
    "[red TO shirt] {a TO b}",
    "red~2 shirt^99999999999",
    "\\ / ' \" ` \x00 \x07",
    "red\ud800shirt \udfff",
    "👍🏻 ❤️ 🇩🇪 \U0010ffff",
    "red " * 20_000,
    "x" * 100_000,
    " ".join(f"w{number}" for number in range(5_000)) + " red",
    "é" * 3_000,
    "'" * 5_000,
    "a'" * 5_000,
    "_" * 5_000,
    "\u200d" * 5_000,
    "\u0301" * 5_000,
    "text:red number:1",
    "<r> <a> red",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    index_folder = tmp_path_factory.mktemp("search")
    build_search(index_folder, TEXTS, engines=ENGINES)
    return index_folder


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, folder: Path) -> Search:
    return open_search(folder, request.param)


def make(**changes: Any) -> Product:
    fields: dict[str, Any] = {
        "asin": "B000000001",
        "title": "Mug",
        "category": "garden",
        "query": "mug",
        "product_category": "A › B",
        "prices": (5.0,),
        "price": 5.0,
    }
    return Product(**(fields | changes))


def test_a_product_is_searched_by_title_description_first_bullet_and_options() -> None:
    product = make(
        title="Big MUG",
        description="For Tea.",
        bullets=("Blue", "not this"),
        options={"color": ("red", "blue"), "size": ("1 | 2",)},
    )
    assert document(product) == "big mug for tea. blue color: red, blue, and size: 1 | 2"


def test_a_bare_product_is_searched_by_its_title() -> None:
    assert document(make()).split() == ["mug"]


def test_both_engines_find_the_same_products(folder: Path) -> None:
    for words in ("red", "cotton shirts", "RED SHOES", "mug for a café"):
        exact, fast = (open_search(folder, name).find(words) for name in ENGINES)
        assert {hit[0] for hit in exact} == {hit[0] for hit in fast}
        assert exact[0][0] == fast[0][0]


def test_an_engine_says_its_name_and_counts(engine: Search) -> None:
    assert engine.name in ENGINES
    assert len(engine.find("red shirt")) == 3
    assert len(engine.find("red shirt", 2)) == 2
    assert engine.find("red shirt")[0][0] == 0


@pytest.mark.parametrize("words", ["", "the of and", "!?", "unheard of"])
def test_a_query_without_known_words_finds_nothing(engine: Search, words: str) -> None:
    assert engine.find(words) == []


@pytest.mark.parametrize("words", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_query_is_a_bag_of_words(engine: Search, words: str) -> None:
    assert all(0 <= number < len(TEXTS) and score > 0 for number, score in engine.find(words))


def test_operators_are_words_or_nothing(engine: Search) -> None:
    assert engine.find('+red -shirt "*" (') == engine.find("red shirt")
    assert engine.find("*") == []


def test_words_beyond_the_first_1024_do_not_count(engine: Search) -> None:
    many = [f"w{number}" for number in range(1024)]
    assert engine.find(" ".join([*many[:1023], "red"])) != []
    assert engine.find(" ".join([*many, "red"])) == []


def test_auto_is_exact_for_small_and_tantivy_for_large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_search(folder).name == "lucene-exact"
    monkeypatch.setattr(search_module, "LARGE", len(TEXTS))
    assert open_search(folder).name == "tantivy"
    assert (default_engines(4), default_engines(5)) == (("lucene-exact",), ("tantivy",))


@pytest.mark.parametrize("name", ENGINES)
def test_auto_takes_the_only_one_there_is(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build_search(tmp_path, TEXTS, engines=(name,))
    assert open_search(tmp_path).name == name
    monkeypatch.setattr(search_module, "LARGE", 1)
    assert open_search(tmp_path).name == name


def test_an_engine_that_was_not_built_is_named_with_those_that_were(tmp_path: Path) -> None:
    build_search(tmp_path, TEXTS)
    with pytest.raises(UsageError, match=r"'tantivy' \(only lucene-exact\)"):
        open_search(tmp_path, "tantivy")


def test_a_folder_without_any_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none.*build the shop's search"):
        open_search(tmp_path)


def test_an_unknown_engine_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="lucene-exact"):
        open_search(tmp_path, "lucene")
    with pytest.raises(UnknownName, match="tantivy"):
        build_search(tmp_path, TEXTS, engines=("tantvy",))


@pytest.mark.parametrize("name", ENGINES)
def test_a_damaged_index_is_refused_with_the_fix(tmp_path: Path, name: str) -> None:
    build_search(tmp_path, TEXTS, engines=(name,))
    largest = max((tmp_path / name).iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"is incomplete.*build the shop's search again"):
        open_search(tmp_path)
    largest.unlink()
    with pytest.raises(UsageError, match="is missing|cannot be read"):
        open_search(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 1}', '{"format": 1, "files": 3}'])
def test_a_broken_manifest_is_refused(tmp_path: Path, content: str) -> None:
    build_search(tmp_path, TEXTS)
    (tmp_path / "lucene-exact" / "search.json").write_text(content)
    with pytest.raises(UsageError, match="is incomplete"):
        open_search(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    build_search(tmp_path, TEXTS)
    manifest = tmp_path / "lucene-exact" / "search.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(UsageError, match="format 2, 1 is expected"):
        open_search(tmp_path)


def test_a_build_that_fails_leaves_the_old_index_and_nothing_else(tmp_path: Path) -> None:
    build_search(tmp_path, TEXTS, engines=ENGINES)

    def breaking() -> Iterator[str]:
        yield "green"
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        build_search(tmp_path, breaking(), engines=ENGINES)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(ENGINES)
    assert len(open_search(tmp_path).find("red")) == 2
    build_search(tmp_path, ["green"], engines=ENGINES)
    for name in ENGINES:
        assert [hit[0] for hit in open_search(tmp_path, name).find("green red")] == [0]


def test_names_must_be_as_many_as_documents(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 names for 5 documents"):
        build_search(tmp_path, TEXTS, names=["a", "b"])


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_search(tmp_path, TEXTS, engines=ENGINES)
    monkeypatch.setitem(sys.modules, "tantivy", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[webshop\]"):
        open_search(tmp_path, "tantivy")
    with pytest.raises(MissingExtra):
        build_search(tmp_path, TEXTS, engines=("tantivy",))
    assert open_search(tmp_path).name == "lucene-exact"


def original() -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """The asins and documents of the original's products, and Lucene's results."""
    data_folder = os.environ.get("ROLLGYM_TEST_DATA")
    if not data_folder:
        pytest.skip("ROLLGYM_TEST_DATA is not set: no results of Lucene to compare with")
    data = Path(data_folder) / "webshop"
    with gzip.open(data / "golden" / "search_top50.jsonl.gz", "rt") as lines:
        results = [json.loads(line) for line in lines]
    records = json.loads((data / "items_shuffle_1000.json").read_text())
    return [record["asin"] for record in records], [document(product(record)) for record in records], results


def product(record: dict[str, Any]) -> Product:
    """What of a record of the original files is searched."""
    bullets = record["small_description"]
    options = {
        name.lower(): tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
        for name, values in (record["customization_options"] or {}).items()
        if values is not None
    }
    return make(
        title=record["name"],
        description=record["full_description"],
        bullets=tuple(bullets) if isinstance(bullets, list) else (bullets,),
        options=options,
    )


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[dict[str, Any]]]:
    asins, texts, results = original()
    index_folder = tmp_path_factory.mktemp("golden")
    build_search(index_folder, texts, engines=ENGINES, names=asins)
    return index_folder, asins, results


def test_all_290_searches_equal_lucenes(golden: tuple[Path, list[str], list[dict[str, Any]]]) -> None:
    index_folder, asins, results = golden
    search = open_search(index_folder)
    assert len(results) == 290
    for result in results:
        hits = search.find(result["query"], 50)
        assert [asins[number] for number, _ in hits] == [asin for asin, _ in result["hits"]], result["query"]
        for (_, score), (asin, expected) in zip(hits, result["hits"], strict=True):
            # Theirs are rounded to 4 places, and each of equal ones is a millionth below the one before.
            assert score == pytest.approx(expected, rel=0, abs=5.1e-5), (result["query"], asin)


def test_tantivy_finds_most_of_what_lucene_finds(
    golden: tuple[Path, list[str], list[dict[str, Any]]],
) -> None:
    index_folder, asins, results = golden
    search = open_search(index_folder, "tantivy")
    shares = []
    for result in results:
        wanted = {asin for asin, _ in result["hits"][:10]}
        hits = {asins[number] for number, _ in search.find(result["query"], 10)}
        shares.append(len(wanted & hits) / max(len(wanted), 1))
    assert sum(shares) / len(shares) > 0.8
