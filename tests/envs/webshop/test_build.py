"""Building shops: once, by one process, whole or not at all; finding them by name; importing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from small_shop import goals, products, raw, two_cups, write_original

from rollgym.core.errors import RunError, UnknownName, UsageError
from rollgym.envs.webshop.catalog import build
from rollgym.envs.webshop.catalog.build import (
    build_shop,
    cache_folder,
    imported_names,
    imported_shop,
    resolve_shop,
    shop_name,
    synthetic_shop,
)
from rollgym.envs.webshop.catalog.imports import import_shop
from rollgym.envs.webshop.catalog.store import DamagedShop, ShopCatalog, open_shop, read_manifest, verify
from rollgym.envs.webshop.types import Goal, Product
from rollgym.io import atomic as folders


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLGYM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shop"


def content(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_shop_is_built_with_its_search(tmp_path: Path) -> None:
    from rollgym.envs.webshop.search import open_search

    told: list[tuple[int, int | None, str]] = []
    made = build_shop(
        tmp_path / "shop", products(12), goals(), progress=lambda *args: told.append(args), total=12
    )
    found = open_search(made / "search").find("cup number 7", 3)
    assert found[0][0] == 7
    assert [what for _, _, what in told] == ["products", "synthetic goals", "search index", "hashes"]
    assert told[0] == (12, 12, "products")
    assert content(tmp_path) == ["shop"], "no lock and no temporary folder stays"
    verify(made)


def test_goals_can_be_made_from_the_products(tmp_path: Path) -> None:
    def cheap(shop: ShopCatalog) -> Iterator[Goal]:
        for number in range(len(shop)):
            product = shop.product(number)
            if product.price < 3:
                goal = goals(1)[0]
                yield Goal(
                    asin=product.asin,
                    instruction="cheap",
                    attributes=goal.attributes,
                    options={},
                    price_upper=3.0,
                )

    catalog = open_shop(build_shop(tmp_path / "s", products(), cheap, search=False))
    assert [catalog.goal(number).asin for number in range(catalog.goal_count)] == ["CUP00000", "CUP00001"]


def test_products_can_be_made_in_a_folder_that_goes_again(tmp_path: Path) -> None:
    def make(work: Path) -> Iterator[Product]:
        (work / "note").write_text("here")
        yield from products()
        assert (work / "note").exists()

    made = build_shop(tmp_path / "s", make, goals(), search=False)
    assert not (made / "work").exists()
    assert len(open_shop(made)) == 4


@pytest.mark.parametrize(
    ("given", "wanted", "said"),
    [
        ([], [], "at least one product"),
        (products(2) + products(1), [], "Two products have the same asin 'CUP00000'"),
        (products(2), goals(3, of=3), "Goal 2 asks for 'CUP00002', which the shop does not have"),
    ],
)
def test_what_is_no_shop_leaves_nothing(
    tmp_path: Path, given: list[Product], wanted: list[Goal], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        build_shop(tmp_path / "out" / "s", given, wanted, search=False)
    assert content(tmp_path / "out") == []


def test_an_error_or_an_interrupt_leaves_the_old_shop_as_it_was(tmp_path: Path) -> None:
    target = build_shop(tmp_path / "out" / "s", products(), goals(), search=False)
    before = read_manifest(target)

    def interrupted() -> Iterator[Product]:
        yield products()[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_shop(target, interrupted(), goals(), search=False)
    assert content(tmp_path / "out") == ["s"]
    assert read_manifest(target) == before


def test_a_shop_is_never_put_in_the_place_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_text("")
    (tmp_path / "letter").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text('{"schema": 1}')
    for name in ("photos", "letter", "run"):
        with pytest.raises(UsageError, match="exists and is not a shop"):
            build_shop(tmp_path / name, products(), goals(), search=False)
        with pytest.raises(UsageError, match="exists and is not a shop"):
            synthetic_shop(5, out=tmp_path / name)
    (tmp_path / "empty").mkdir()
    build_shop(tmp_path / "empty", products(), goals(), search=False)


def test_a_disk_that_fails_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "write_shop", full)
    with pytest.raises(RunError, match="Cannot write .*: the disk is full"):
        build_shop(tmp_path / "out" / "s", products(), goals())
    assert content(tmp_path / "out") == []


def test_a_synthetic_shop_is_built_once_and_the_same_everywhere(cache: Path, tmp_path: Path) -> None:
    first = synthetic_shop(20, 3)
    stamp = (first / "manifest.json").stat().st_mtime_ns
    assert synthetic_shop(20, 3) == first == resolve_shop("synthetic:20:3")
    assert (first / "manifest.json").stat().st_mtime_ns == stamp
    assert content(cache) == [first.name]
    again = synthetic_shop(20, 3, out=tmp_path / "mine")
    assert open_shop(again).fingerprint == open_shop(first).fingerprint
    assert open_shop(synthetic_shop(20, 4)).fingerprint != open_shop(first).fingerprint
    assert read_manifest(first)["name"] == "synthetic:20:3"
    catalog = open_shop(first)
    assert (len(catalog), catalog.goals) == (20, "synthetic")
    assert catalog.goal_count > 0


def test_a_shop_of_an_older_generator_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, mine = synthetic_shop(5), synthetic_shop(5, out=tmp_path / "mine")
    keys = [read_manifest(mine)["key"]]
    monkeypatch.setattr(build, "_sources", lambda: "other sources")
    assert synthetic_shop(5) != first
    keys.append(read_manifest(synthetic_shop(5, out=mine))["key"])
    assert keys[0] != keys[1]


def test_a_half_written_or_damaged_synthetic_shop_is_built_again() -> None:
    made = synthetic_shop(10)
    for damage in (
        lambda: (made / "manifest.json").unlink(),
        lambda: (made / "manifest.json").write_text("{"),
        lambda: (made / "products.offsets").unlink(),
        lambda: os.truncate(made / "products.blob", 100),
    ):
        damage()
        assert synthetic_shop(10) == made
        verify(made)


def test_what_a_killed_process_left_is_removed(cache: Path) -> None:
    made = synthetic_shop(10)
    (made / "manifest.json").unlink()
    (cache / f".{made.name}.new-killed").mkdir()
    (cache / f".{made.name}.new-killed" / "products.blob").write_text("half")
    (cache / f".{made.name}.lock").write_text("")
    synthetic_shop(10)
    assert content(cache) == [made.name]


BUILDER = """
import sys, time
from rollgym.envs.webshop.catalog import build
write = build.write_shop
def slow(*args, **kwargs):
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    time.sleep(0.5)
    write(*args, **kwargs)
build.write_shop = slow
print("ready", flush=True)
sys.stdin.readline()
print(build.synthetic_shop(30, 1))
"""


def test_two_processes_at_once_build_it_once(tmp_path: Path, cache: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", BUILDER, str(log)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    folders = {process.communicate(timeout=60)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert log.read_text() == "built\n"
    assert content(cache) == [Path(*folders).name]
    verify(Path(*folders))


def test_a_lock_is_taken_anew_when_its_file_is_gone(tmp_path: Path) -> None:
    """Whoever waits must not hold a file that nobody else can see."""
    target, held = tmp_path / "s", []
    with folders.locked(target):
        waiting = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; from pathlib import Path\n"
                "from rollgym.io.atomic import locked\n"
                "print('waits', flush=True)\n"
                "with locked(Path(sys.argv[1])): print((Path(sys.argv[1]).parent / '.s.lock').exists())",
                str(target),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert waiting.stdout is not None
        held.append(waiting.stdout.readline())
        time.sleep(0.2)
        assert waiting.poll() is None
    assert (held, waiting.communicate(timeout=60)[0]) == (["waits\n"], "True\n")
    assert content(tmp_path) == []


def test_ctrl_c_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    code = (
        "import time; from rollgym.envs.webshop.catalog import writer\n"
        "def slow(*args):\n    print('building', flush=True)\n    time.sleep(60)\n"
        "writer.write_goals = slow\n"
        "from rollgym.cli import main; main(['shop', 'build', '--size', '10'])"
    )
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs, such as `make test &`, with SIGINT ignored, and children inherit it.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    assert content(cache) != []
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "Traceback" not in said
    assert content(cache) == []


def test_a_cache_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROLLGYM_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"Cannot write .* to .*Set ROLLGYM_CACHE"):
        synthetic_shop(5)
    with pytest.raises(UsageError, match="Cannot write .* to "):
        import_shop(two_cups(tmp_path / "data"), search=False)


def test_a_cache_that_can_only_be_read_serves_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = synthetic_shop(10)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folders.os, "open", refuse)
    monkeypatch.setattr(folders.tempfile, "mkdtemp", refuse)
    assert resolve_shop("synthetic:10") == made
    with pytest.raises(UsageError, match=r"Cannot write .* to .*Permission denied"):
        resolve_shop("synthetic:11")


def test_the_cache_is_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache" / "shop"
    monkeypatch.delenv("ROLLGYM_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "rollgym" / "shop"


@pytest.mark.parametrize(
    ("name", "size", "seed", "style"),
    [
        ("synthetic", 1000, 0, "full"),
        ("synthetic:5", 5, 0, "full"),
        ("synthetic:5:7", 5, 7, "full"),
        ("synthetic:1000:7", 1000, 7, "full"),
        ("simple:30", 30, 0, "simple"),
    ],
)
def test_names_of_synthetic_shops(
    name: str, size: int, seed: int, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(build, "synthetic_shop", lambda *args, **more: asked.append((*args, more["style"])))
    resolve_shop(name)
    assert asked == [(size, seed, style)]
    assert shop_name(size, seed, style) == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("synthetic:", "use synthetic:SIZE"),
        ("synthetic:many", "use synthetic:SIZE or synthetic:SIZE:SEED"),
        ("synthetic:5:-1", "use synthetic:SIZE"),
        ("simple:1:2:3", "use simple:SIZE"),
        ("synthetic:" + "9" * 5000, "use synthetic:SIZE"),
        ("synthetic:0", "from 1 to 10,000,000 products, not 0"),
        ("synthetic:10000001", "from 1 to 10,000,000"),
        ("sinthetic", "no shop called 'sinthetic'. Did you mean synthetic"),
        ("some/folder", "Shop folder not found: some/folder"),
        ("two words", "cannot be called 'two words'"),
        ("", "cannot be called ''"),
    ],
)
def test_names_that_are_none(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve_shop(name)


def test_seeds_and_styles_are_checked() -> None:
    with pytest.raises(UsageError, match="0 or more, not -1"):
        synthetic_shop(5, -1)
    with pytest.raises(UnknownName, match="Did you mean simple"):
        synthetic_shop(5, style="simpel")


def test_a_folder_is_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_shop(tmp_path / "mine", products(), goals(), search=False)
    monkeypatch.chdir(tmp_path)
    assert resolve_shop(made) == resolve_shop(str(made)) == resolve_shop("mine") == made
    with pytest.raises(DamagedShop, match="it has no manifest"):
        resolve_shop(tmp_path)


def test_an_import_is_found_by_its_name(tmp_path: Path, cache: Path) -> None:
    made = import_shop(two_cups(tmp_path / "data"), search=False, seed=4)
    assert (made.name, made.folder) == ("webshop", cache / "import-webshop")
    assert resolve_shop("webshop") == imported_shop("webshop") == made.folder
    assert imported_names() == ["webshop"]
    assert content(cache) == ["import-webshop"]
    catalog = open_shop(made.folder)
    assert len(catalog) == 2
    assert 1000.5 <= catalog.product(1).price <= 1200.0
    assert {tuple(catalog.goal(n).options.items()) for n in range(2)} == {  # type: ignore[union-attr]
        (("color", "navy | red"),),
        (("color", "blue"),),
    }
    assert catalog.goal(0).instruction.startswith("Find me hand made cups with color: ")
    assert catalog.goal(0).weight == 0.5, "both goals want the attribute"
    human = catalog.with_goals("human")
    assert (human.goal_count, human.goal(0).instruction) == (1, "i want a bowl")
    manifest = read_manifest(made.folder)
    assert (manifest["kind"], manifest["seed"], manifest["tagger"]) == ("imported", 4, "light-1")
    assert set(manifest["source"]) == {"items_shuffle.json", "items_ins_v2.json", "items_human_ins.json"}
    with pytest.raises(UnknownName, match="Did you mean webshop"):
        resolve_shop("webshp")


def test_prices_nouns_and_kinds_of_goals_can_be_given(tmp_path: Path) -> None:
    data = two_cups(tmp_path / "data")
    (tmp_path / "prices.json").write_text('{"B000000002": 1111}')
    (tmp_path / "nouns.json").write_text('{"B000000001": ["Given"]}')
    made = import_shop(
        data,
        name="mine",
        prices=tmp_path / "prices.json",
        nouns=tmp_path / "nouns.json",
        goals="human",
        search=False,
    )
    catalog = open_shop(made.folder)
    assert (catalog.goals, catalog.goal_count) == ("human", 1)
    assert [catalog.product(n).price for n in range(2)] == [19.99, 1111.0]
    assert [catalog.product(n).nouns for n in range(2)] == [("given",), ("green", "bowl")]
    assert catalog.manifest["tagger"] == "file, else light-1"
    assert catalog.manifest["prices"] == "file, else drawn"


def test_an_import_is_the_same_twice_and_another_with_another_seed(tmp_path: Path) -> None:
    data = two_cups(tmp_path / "data")
    found = [
        open_shop(import_shop(data, name=f"n{number}", seed=seed, search=False).folder)
        for number, seed in enumerate((0, 0, 1))
    ]
    assert found[0].fingerprint == found[1].fingerprint != found[2].fingerprint
    assert found[0].product(1).price != found[2].product(1).price


def test_a_second_import_takes_the_place_of_the_first(tmp_path: Path, cache: Path) -> None:
    import_shop(two_cups(tmp_path / "data"), search=False)
    with pytest.raises(UsageError, match="--strict"):
        import_shop(write_original(tmp_path / "bad", [raw(name=3)]), strict=True, search=False)
    assert len(open_shop(resolve_shop("webshop"))) == 2, "a failed import changes nothing"
    import_shop(write_original(tmp_path / "other", [raw()]), search=False)
    assert len(open_shop(resolve_shop("webshop"))) == 1
    assert content(cache) == ["import-webshop"]


def test_a_damaged_import_is_refused_with_the_fix(tmp_path: Path) -> None:
    made = import_shop(two_cups(tmp_path / "data"), search=False)
    os.truncate(made.folder / "products.blob", 10)
    fix = "Import it again: rollgym shop import DIR --name webshop"
    with pytest.raises(DamagedShop, match=rf"products.blob has 10 bytes.*{fix}"):
        resolve_shop("webshop")
    (made.folder / "manifest.json").unlink()
    with pytest.raises(DamagedShop, match=f"it has no manifest.*{fix}"):
        resolve_shop("webshop")
    import_shop(tmp_path / "data", search=False)
    verify(resolve_shop("webshop"))


def test_mistakes_of_an_import(tmp_path: Path) -> None:
    data = write_original(tmp_path / "data", [raw()])
    for options, said in (
        ({"goals": "all"}, "one of synthetic, human, both, not 'all'"),
        ({"goals": "human"}, "has no items_human_ins.json"),
        ({"name": "synthetic"}, "which is a built-in one"),
        ({"name": "../up"}, "cannot be called '../up'"),
        ({"prices": tmp_path / "none"}, "cannot be read"),
    ):
        with pytest.raises(UsageError, match=said):
            import_shop(data, search=False, **options)  # type: ignore[arg-type]


def test_the_original_thousand_products_as_a_shop() -> None:
    data = os.environ.get("ROLLGYM_TEST_DATA")
    if data is None:
        pytest.skip("ROLLGYM_TEST_DATA is not set: no original files to import")
    folder = Path(data) / "webshop"
    golden = folder / "golden"
    made = import_shop(
        folder,
        prices=golden / "product_prices.json",
        nouns=golden / "title_nouns.json",
        strict=True,
        search=False,
    )
    assert made.name == "webshop-1000"
    catalog = open_shop(made.folder)
    human = catalog.with_goals("human")
    assert (len(catalog), catalog.goal_count, human.goal_count) == (1000, 6910, 13)
    wanted = {catalog.goal_product(number) for number in range(catalog.goal_count)}
    assert len(wanted) == 415
    sizes = {name: len(part) for name, part in catalog.splits["original"].items()}
    assert sizes == {"test": 500, "dev": 1000, "train": 5410}
    prices = json.loads((golden / "product_prices.json").read_text())
    assert all(catalog.product(n).price == prices[catalog.product(n).asin] for n in range(1000))
    tests, trains = (
        {catalog.goal_product(number) for number in catalog.splits["original"][name]}
        for name in ("test", "train")
    )
    assert (len(tests), len(tests & trains)) == (146, 125)
