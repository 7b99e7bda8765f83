"""The original files: what is read of them, and what is said about those that are wrong."""

import json
import math
import os
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small_shop import COLOURS, raw, two_cups, write_original

from rollgym.core.errors import MissingExtra, UsageError
from rollgym.envs.webshop.catalog.jsonfiles import find_files, read_noun_file, read_price_file
from rollgym.envs.webshop.catalog.records import Problems, Record, draw_price, parse_prices, read_records


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def read(folder: Path, work: Path, **options: Any) -> list[Record]:
    return list(read_records(find_files(folder), work, nouns=lambda _, title: (title,), **options))


def one(tmp_path: Path, work: Path, attributes: dict[str, Any] | None = None, **changes: Any) -> Record:
    (record,) = read(write_original(tmp_path / "data", [raw(**changes)], attributes), work)
    return record


def test_a_product_is_read_field_by_field(tmp_path: Path, work: Path) -> None:
    product = one(tmp_path, work, customization_options=COLOURS).product
    assert product.asin == "B000000001"
    assert product.title == "Blue Cup for Tea"
    assert product.description == "Made of clay."
    assert product.bullets == ("Holds a litre ", "Blue")
    assert (product.category, product.query) == ("garden", "cups")
    assert product.product_category == "Home › Kitchen › Cups"
    assert (product.prices, product.price, product.price_text) == ((19.99,), 19.99, "$19.99")
    assert product.options == {"color": ("navy | red", "blue")}
    assert product.attributes == ("DUMMY_ATTR",)
    assert product.nouns == ("Blue Cup for Tea",)
    assert product.image == "http://localhost/cup.jpg"


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"small_description": "one line"}, "bullets", ("one line",)),
        ({"small_description": []}, "bullets", ()),
        ({"full_description": None}, "description", ""),
        ({"images": []}, "image", ""),
        ({"customization_options": None}, "options", {}),
        ({"pricing": ""}, "prices", (100.0,)),
        ({"pricing": None}, "prices", (100.0,)),
        ({"pricing": "$19.99 - $27.99"}, "prices", (19.99, 27.99)),
    ],
)
def test_what_a_field_may_also_be(
    tmp_path: Path, work: Path, changes: dict[str, Any], field: str, value: object
) -> None:
    assert getattr(one(tmp_path, work, **changes).product, field) == value


def test_attributes_and_instructions_are_found_whatever_their_order(tmp_path: Path, work: Path) -> None:
    first, second = read(two_cups(tmp_path / "data"), work)
    assert first.product.attributes == ("hand made", "dishwasher safe")
    assert first.instructions.instruction == "Find me hand made cups"
    assert first.instructions.instruction_attributes == ("hand made",)
    assert first.instructions.human == ()
    assert second.product.attributes == ()
    assert second.instructions.instruction is None
    assert [wish.instruction for wish in second.instructions.human] == ["i want a bowl.", "a bowl"]
    assert second.instructions.human[0].instruction_attributes == ("big",)


def test_prices_with_thousands_and_without_sense() -> None:
    assert parse_prices("$1,000.50 - $1,200.00") == (1000.5, 1200.0)
    assert parse_prices("$5 - $6 - $7") == (5.0, 6.0)
    for text in ("gratis", "$", "$1.2.3"):
        with pytest.raises(ValueError, match="holds no price"):
            parse_prices(text)


def test_a_price_within_a_range_depends_on_seed_and_asin_alone() -> None:
    drawn = draw_price((10.0, 20.0), "B1", 0)
    assert 10.0 <= drawn <= 20.0
    assert draw_price((10.0, 20.0), "B1", 0) == drawn
    assert draw_price((20.0, 10.0), "B1", 0) == drawn
    assert len({drawn, draw_price((10.0, 20.0), "B2", 0), draw_price((10.0, 20.0), "B1", 1)}) == 3
    assert draw_price((10.0,), "B1", 0) == 10.0


def test_prices_can_be_given(tmp_path: Path, work: Path) -> None:
    records = read(two_cups(tmp_path / "data"), work, prices={"B000000002": 1100.0})
    assert [record.product.price for record in records] == [19.99, 1100.0]


def test_what_the_original_passes_over_is_counted(tmp_path: Path, work: Path) -> None:
    items = [raw("nan"), raw("B00000000012"), raw("B1"), raw("B1", name="again"), raw("B2")]
    problems = Problems(strict=True)
    records = read(write_original(tmp_path / "data", items), work, problems=problems)
    assert [(r.product.asin, r.product.title) for r in records] == [
        ("B1", "Blue Cup for Tea"),
        ("B2", "Blue Cup for Tea"),
    ]
    assert problems.passed_over == {"no product id": 2, "seen before": 1}
    assert problems.bad == 0


BAD = [
    (raw(name=None), "record 1 (B000000001): Expected `str`, got `null` at `name"),
    (raw(name=7), "Expected `str`, got `int`"),
    ({"asin": "B000000001"}, "missing required field `name`"),
    (raw(asin=12), "record 1: Expected `str`, got `int`"),
    (raw(pricing="soon"), "pricing 'soon' holds no price such as $19.99"),
    (raw(customization_options={"Size": [{"asin": "x"}]}), "missing required field `value`"),
    (raw(small_description={"a": 1}), "small_description"),
    ("a word", "got `str`"),
]


@pytest.mark.parametrize(("item", "said"), BAD)
def test_a_bad_record_is_left_out_and_named(tmp_path: Path, work: Path, item: Any, said: str) -> None:
    folder = write_original(tmp_path / "data", [raw("B0"), item, raw("B2")])
    problems = Problems()
    assert [record.product.asin for record in read(folder, work, problems=problems)] == ["B0", "B2"]
    assert problems.bad == 1
    assert problems.first[0].startswith("items_shuffle.json, record 1")
    assert said in problems.first[0]


def test_strict_stops_at_the_first_bad_record(tmp_path: Path, work: Path) -> None:
    folder = write_original(tmp_path / "data", [raw("B0"), raw("B1", pricing="soon")])
    with pytest.raises(UsageError, match=r"items_shuffle.json, record 1 \(B1\): pricing 'soon'.*--strict"):
        read(folder, work, problems=Problems(strict=True))


def test_many_bad_records_are_counted_and_few_are_told(tmp_path: Path, work: Path) -> None:
    items = [raw("B0"), *(raw(f"B{n}", name=None) for n in range(1, 21))]
    problems = Problems()
    read(write_original(tmp_path / "data", items), work, problems=problems)
    assert (problems.bad, len(problems.first)) == (20, 5)


def test_bad_records_of_the_other_files_are_named_too(tmp_path: Path, work: Path) -> None:
    attributes = {"B0": {"attributes": "no list"}, "B1": {"attributes": [], "instruction": "Find me one"}}
    human = {"B0": [{"instruction": 3}]}
    folder = write_original(tmp_path / "data", [raw("B0"), raw("B1")], attributes, human)
    problems = Problems()
    first, second = read(folder, work, problems=problems)
    assert first.product.attributes == ("DUMMY_ATTR",)
    assert first.instructions.human == ()
    assert second.instructions.instruction is None
    assert [sentence.split(":")[0] for sentence in problems.first] == [
        "items_ins_v2.json, record 0 (B0)",
        "items_ins_v2.json, record 1 (B1)",
        "items_human_ins.json, record 0 (B0)",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps([raw("B0"), raw("B1")])[:-40], "is invalid JSON after 1 records"),
        ('[{"asin": NaN}]', "is invalid JSON after 0 records"),
        ('{"B0": 1}', "must hold an array of products and begin with \\["),
        ("", "begin with \\[, not ''"),
        ("[]", "holds no product that could be read"),
        ('[{"asin": "B0"}]', "holds no product.*The first bad record"),
    ],
)
def test_a_file_that_is_no_catalogue_is_refused(tmp_path: Path, work: Path, text: str, said: str) -> None:
    folder = write_original(tmp_path / "data", [])
    (folder / "items_shuffle.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        read(folder, work)


def test_files_are_found_in_a_folder_or_by_their_name(tmp_path: Path) -> None:
    small = write_original(tmp_path, [raw()], ending="_1000")
    assert find_files(small).products.name == "items_shuffle_1000.json"
    assert find_files(small).human is None
    write_original(tmp_path, [raw()], human={})
    with pytest.raises(UsageError, match=r"items_shuffle.json and items_shuffle_1000.json: name the"):
        find_files(small)
    files = find_files(tmp_path / "items_shuffle_1000.json")
    assert (files.attributes.name, files.human) == (
        "items_ins_v2_1000.json",
        tmp_path / "items_human_ins.json",
    )
    (tmp_path / "items_ins_v2_1000.json").unlink()
    assert find_files(tmp_path / "items_shuffle_1000.json").attributes.name == "items_ins_v2.json"
    with pytest.raises(UsageError, match="Folder not found: "):
        find_files(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no items_shuffle\*.json"):
        find_files(tmp_path / "empty")


def test_progress_ends_at_the_size_of_each_file(tmp_path: Path, work: Path) -> None:
    folder, told = two_cups(tmp_path / "data"), []
    read(folder, work, progress=lambda done, total, what: told.append((done, total, what)))
    sizes = {name: (folder / name).stat().st_size for name in ("items_ins_v2.json", "items_shuffle.json")}
    assert told == [(size, size, name) for name, size in sizes.items()]


def test_products_are_streamed(tmp_path: Path, work: Path) -> None:
    """Ten times the products need hardly more memory."""
    peaks = []
    for count in (200, 2000):
        items = [raw(f"B{number}", full_description="x" * 5000) for number in range(count)]
        folder = write_original(tmp_path / str(count), items)
        tracemalloc.start()
        assert sum(1 for _ in read_records(find_files(folder), work, nouns=lambda *_: ())) == count
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 1_000_000


def test_without_ijson_the_extra_is_named(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ijson", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[webshop\]"):
        read(two_cups(tmp_path / "data"), work)


@pytest.mark.parametrize(
    ("read_file", "text", "said"),
    [
        (read_price_file, '{"B0": "cheap"}', "the price of B0 must be a number, not 'cheap'"),
        (read_price_file, '{"B0": NaN}', "the price of B0"),
        (read_price_file, '{"B0": true}', "the price of B0"),
        (read_price_file, "[1]", "must hold one JSON object of prices by asin"),
        (read_noun_file, '{"B0": "cup"}', "the nouns of B0 must be a list of words"),
        (read_noun_file, '{"B0": [1]}', "the nouns of B0"),
        (read_noun_file, "{", "is not a JSON file"),
    ],
)
def test_files_of_prices_and_nouns_are_checked(tmp_path: Path, read_file: Any, text: str, said: str) -> None:
    path = tmp_path / "given.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read_file(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(tmp_path / "nowhere.json")


def test_the_original_thousand_products(work: Path) -> None:
    data = os.environ.get("ROLLGYM_TEST_DATA")
    if data is None:
        pytest.skip("ROLLGYM_TEST_DATA is not set: no original products to read")
    problems = Problems(strict=True)
    records = read(Path(data) / "webshop", work, problems=problems)
    products = [record.product for record in records]
    instructed = [record for record in records if record.instructions.instruction is not None]
    assert (len(products), problems.passed_over) == (1000, {})
    assert Counter(len(product.options) for product in products) == {0: 577, 1: 245, 2: 165, 3: 13}
    assert sum(len(product.prices) == 2 for product in products) == 93
    assert all(min(product.prices) <= product.price <= max(product.prices) for product in products)
    assert len(instructed) == 415
    assert sum(math.prod(map(len, record.product.options.values())) for record in instructed) == 6910
    assert sum(len(record.instructions.human) for record in records) == 13
