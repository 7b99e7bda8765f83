"""A shop on disk: what is written is read again, by number and by name, and damage is noticed."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from small_shop import goals, products

from rollgym.core.errors import RunError, UsageError
from rollgym.envs.webshop.catalog.build import build_shop
from rollgym.envs.webshop.catalog.store import (
    CACHED,
    DamagedShop,
    ShopCatalog,
    open_shop,
    read_manifest,
    verify,
)
from rollgym.envs.webshop.catalog.table import Names, Numbers, Table, TableWriter, write_names
from rollgym.envs.webshop.catalog.writer import original_split
from rollgym.envs.webshop.types import Catalog, Goal


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return build_shop(tmp_path / "shop", products(20), goals(60, of=20), search=False)


def test_a_table_gives_back_its_records(tmp_path: Path) -> None:
    with TableWriter(tmp_path, "t") as writer:
        for record in (b"one", b"", b"three"):
            writer.add(record)
    table = Table(tmp_path, "t")
    assert [bytes(table[number]) for number in range(len(table))] == [b"one", b"", b"three"]
    for number in (-1, 3):
        with pytest.raises(IndexError, match=f"{number} is not between 0 and 2"):
            table[number]
    with TableWriter(tmp_path, "empty"):
        pass
    assert len(Table(tmp_path, "empty")) == 0


def test_names_are_found_and_only_they(tmp_path: Path) -> None:
    keys = ["B2", "B10", "B1", "Ä", "B2"]
    assert write_names(tmp_path, "n", [key.encode() for key in keys]) == "B2"
    names = Names(tmp_path, "n")
    assert [names.find(key) for key in ("B1", "B10", "Ä")] == [2, 1, 3]
    assert names.find("B2") == 4, "the last of equal names"
    for stranger in ("", "B", "B100", "B3", "a", "B1\0", "\ud83d", "B1000000000000000"):
        assert names.find(stranger) is None
    assert write_names(tmp_path, "none", []) is None
    assert Names(tmp_path, "none").find("B1") is None


def test_numbers_are_pythons_own() -> None:
    numbers = Numbers(np.array([3, 1, 2], dtype="<u4"))
    assert (list(numbers), len(numbers), numbers[-1], 1 in numbers) == ([3, 1, 2], 3, 2, True)
    assert numbers[1:] == [1, 2]
    assert json.dumps(numbers[0]) == "3"
    with pytest.raises(IndexError):
        numbers[3]


def test_what_was_put_in_comes_out(shop: Path) -> None:
    catalog: Catalog = ShopCatalog.open(shop)
    assert [catalog.product(number) for number in range(len(catalog))] == products(20)
    assert [catalog.goal(number) for number in range(catalog.goal_count)] == goals(60, of=20)
    assert catalog.number("CUP00007") == 7
    assert catalog.number("CUP00020") is None
    for number in (-1, 20):
        with pytest.raises(IndexError):
            catalog.product(number)
    with pytest.raises(IndexError):
        catalog.goal(60)


def test_a_goal_knows_its_product(shop: Path) -> None:
    catalog = ShopCatalog.open(shop)
    assert [catalog.goal_product(number) for number in (0, 19, 20, 59)] == [0, 19, 0, 19]


def test_options_by_name_and_bare_ones_are_told_apart(tmp_path: Path) -> None:
    bare = Goal(asin="CUP00000", instruction="", attributes=(), options=("red",), price_upper=1.0, human=True)
    made = build_shop(tmp_path / "s", products(), {"synthetic": goals(), "human": [bare]}, search=False)
    assert ShopCatalog.open(made).goal(0).options == {"color": "red"}
    assert ShopCatalog.open(made, "human").goal(0) == bare


def test_the_order_can_be_given(tmp_path: Path) -> None:
    def backwards(count: int) -> range:
        return range(count - 1, -1, -1)

    made = build_shop(tmp_path / "s", products(), goals(10), order=backwards, search=False)
    catalog = ShopCatalog.open(made)
    assert [catalog.goal(number) for number in range(10)] == goals(10)[::-1]
    assert [catalog.goal_product(number) for number in range(3)] == [1, 0, 3]


def test_the_original_split_goes_by_the_order(tmp_path: Path) -> None:
    assert original_split(6910) == [500, 1000, 5410]
    assert original_split(3000) == [500, 1000, 1500]
    assert original_split(2999) == [299, 599, 2101]
    made = build_shop(tmp_path / "s", products(), goals(30), search=False)
    split = ShopCatalog.open(made).splits["original"]
    assert {name: list(part) for name, part in split.items()} == {
        "test": [0, 1, 2],
        "dev": [3, 4, 5, 6, 7, 8],
        "train": list(range(9, 30)),
    }


def test_the_disjoint_split_shares_no_product(tmp_path: Path) -> None:
    made = build_shop(tmp_path / "s", products(200), goals(1000, of=200), search=False)
    catalog = ShopCatalog.open(made)
    split = catalog.splits["disjoint"]
    assert sorted(number for part in split.values() for number in part) == list(range(1000))
    owned = {name: {catalog.goal(number).asin for number in part} for name, part in split.items()}
    assert len(set().union(*owned.values())) == sum(map(len, owned.values())) == 200
    assert {name: len(part) for name, part in split.items()} == {"test": 100, "dev": 200, "train": 700}
    assert list(split["train"]) == sorted(split["train"])
    assert owned["test"] != {product.asin for product in products(20)}, "by a hash, not by the order"
    half = ShopCatalog.open(build_shop(tmp_path / "h", products(200), goals(200, of=200)[::-1], search=False))
    again = {half.goal(number).asin for number in half.splits["disjoint"]["test"]}
    assert again == owned["test"], "whatever the order of the goals"


def test_the_goals_of_a_single_product_are_for_training(tmp_path: Path) -> None:
    made = build_shop(tmp_path / "s", products(1), goals(5, of=1), search=False)
    split = ShopCatalog.open(made).splits["disjoint"]
    assert {name: len(part) for name, part in split.items()} == {"test": 0, "dev": 0, "train": 5}


def test_two_kinds_of_goals_on_the_same_products(tmp_path: Path) -> None:
    kinds = {"synthetic": goals(10), "human": goals(3)}
    catalog = ShopCatalog.open(build_shop(tmp_path / "s", products(), kinds, search=False))
    human = catalog.with_goals("human")
    assert (catalog.goal_count, human.goal_count) == (10, 3)
    assert catalog.human_goals is not None
    assert human.goal(0) == goals(3)[0]
    assert human.fingerprint != catalog.fingerprint
    assert human.with_goals(None).goals == "synthetic"
    with pytest.raises(UsageError, match="has no robot goals, only synthetic, human"):
        catalog.with_goals("robot")


def test_a_shop_without_goals_is_a_shop(tmp_path: Path) -> None:
    catalog = ShopCatalog.open(build_shop(tmp_path / "s", products(), {}, search=False))
    assert (len(catalog), catalog.goal_count, catalog.goals, catalog.human_goals) == (
        4,
        0,
        None,
        None,
    )
    with pytest.raises(IndexError):
        catalog.goal(0)
    empty = ShopCatalog.open(build_shop(tmp_path / "e", products(), [], search=False))
    assert (empty.goal_count, empty.splits["original"]["train"]) == (0, range(0))
    assert list(empty.splits["disjoint"]["train"]) == []


def test_the_fingerprint_is_of_the_content_alone(tmp_path: Path) -> None:
    def fingerprint(name: str, count: int, goal_count: int = 4) -> str:
        made = build_shop(tmp_path / name, products(count), goals(goal_count), search=False)
        return ShopCatalog.open(made).fingerprint

    assert fingerprint("a", 4) == fingerprint("b", 4)
    assert len({fingerprint("a", 4), fingerprint("c", 5), fingerprint("d", 4, 5)}) == 3


def test_opening_twice_gives_one_object_until_the_shop_is_another(shop: Path) -> None:
    first = open_shop(shop)
    assert open_shop(str(shop) + "/") is first
    build_shop(shop, products(3), goals(3, of=3), search=False)
    assert len(open_shop(shop)) == 3
    assert len(first) == 20, "who has the old one open keeps it"
    assert first.product(19) == products(20)[19]


def test_decoded_products_are_remembered_but_not_without_bound(tmp_path: Path) -> None:
    made = build_shop(tmp_path / "s", products(CACHED + 5), goals(), search=False)
    catalog = ShopCatalog.open(made)
    first = catalog.product(0)
    assert catalog.product(0) is first
    for number in range(1, CACHED + 5):
        catalog.product(number)
    assert catalog.product(0) is not first


def test_threads_share_a_catalogue(shop: Path) -> None:
    catalog, wrong = ShopCatalog.open(shop), []

    def look() -> None:
        for number in [*range(20)] * 50:
            product = catalog.product(number)
            if catalog.number(product.asin) != number:
                wrong.append(number)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_opening_reads_no_products(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("msgspec.msgpack.Decoder", lambda kind: None)
    assert len(ShopCatalog.open(shop)) == 20


def test_a_shop_opens_without_the_optional_packages(shop: Path) -> None:
    code = (
        "import sys; from rollgym.envs.webshop.catalog.store import open_shop\n"
        "open_shop(sys.argv[1]).product(0)\n"
        "print(sorted({'ijson', 'tantivy', 'regex', 'rapidfuzz', 'jinja2', 'spacy'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code, shop], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_folder_that_is_no_shop(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Shop folder not found: "):
        open_shop(tmp_path / "nowhere")
    with pytest.raises(DamagedShop, match=r"never finished: it has no manifest.json"):
        open_shop(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ('{"format": 1', "cannot be read"),
        ("[]", "does not describe a shop"),
        ('{"format": 1}', "does not describe a shop"),
        (
            '{"format": 99, "files": {}, "goals": {}, "fingerprint": ""}',
            "has format 99, but this rollgym reads 1",
        ),
    ],
)
def test_a_manifest_that_is_none(shop: Path, text: str, said: str) -> None:
    (shop / "manifest.json").write_text(text)
    with pytest.raises(DamagedShop, match=said):
        open_shop(shop)


@pytest.mark.parametrize("name", ["products.blob", "products.offsets", "goals-synthetic.disjoint"])
def test_a_file_cut_short_or_missing_is_noticed_at_once(shop: Path, name: str) -> None:
    size = (shop / name).stat().st_size
    os.truncate(shop / name, size - 1)
    with pytest.raises(DamagedShop, match=rf"{name} has {size - 1} bytes instead of {size}"):
        ShopCatalog.open(shop)
    (shop / name).unlink()
    with pytest.raises(DamagedShop, match=f"{name} is missing"):
        ShopCatalog.open(shop)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def test_a_changed_byte_is_found_by_its_hash(shop: Path) -> None:
    assert verify(shop) == len(read_manifest(shop)["files"]) == 8
    flip(shop / "goals-synthetic.blob", 30)
    ShopCatalog.open(shop)
    with pytest.raises(DamagedShop, match=r"goals-synthetic.blob does not match its hash"):
        verify(shop)


def test_a_changed_manifest_is_found_too(shop: Path) -> None:
    manifest = read_manifest(shop)
    (shop / "manifest.json").write_text(json.dumps(manifest | {"fingerprint": "another"}))
    with pytest.raises(DamagedShop, match="fingerprint does not match"):
        verify(shop)


def test_a_record_that_cannot_be_read_is_a_sentence(shop: Path) -> None:
    flip(shop / "products.blob", 0)
    with pytest.raises(RunError, match=r"is damaged: product 0 cannot be read .*shop info --verify"):
        ShopCatalog.open(shop).product(0)
