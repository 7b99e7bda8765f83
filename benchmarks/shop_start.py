"""Time and memory to open a shop: from its built folder and from JSON.

    python benchmarks/shop_start.py [--quick] [--sizes 1000 100000 1000000] [--folder DIR]

Each figure is a fresh process with the packages imported. "Built" opens products, goals and search engine and
reads one goal with its product; the first search is timed apart. "JSON" loads the same products and goals
with Python's json into lists and a dictionary by asin, without any search index. Memory is what a process has
for itself; mapped files are shared by all processes. The files have just been written, so they are in the
system's cache. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from rollgym.envs.webshop.catalog.build import synthetic_shop
from rollgym.envs.webshop.catalog.store import ShopCatalog, open_shop
from rollgym.envs.webshop.search import open_search


def private_memory() -> float:
    """Megabytes that this process has for itself."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        words = [line.split() for line in lines]
    return sum(int(word[1]) for word in words if word[0] in ("Private_Clean:", "Private_Dirty:")) / 1024


def mapped_memory() -> float:
    """Megabytes of this process that are in memory at all, shared ones included."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) / 1024


def open_built(folder: Path) -> dict[str, float]:
    """Open a shop and use it once."""
    memory, mapped, began = private_memory(), mapped_memory(), time.perf_counter()
    shop = open_shop(folder)
    search = open_search(folder / "search")
    goal = shop.goal(shop.goal_count // 2)
    shop.product(shop.number(goal.asin) or 0)
    opened = time.perf_counter() - began
    private, total = private_memory() - memory, mapped_memory() - mapped
    began = time.perf_counter()
    search.find(goal.instruction)
    return {
        "seconds": opened,
        "memory_mb": private,
        "with_mapped_mb": total,
        "first_search_seconds": time.perf_counter() - began,
    }


def load_json(folder: Path) -> dict[str, float]:
    """Load the same from JSON."""
    memory, began = private_memory(), time.perf_counter()
    with open(folder / "shop.json", encoding="utf-8") as file:
        products, goals = json.load(file)
    by_asin = {product["asin"]: product for product in products}
    assert by_asin[goals[len(goals) // 2]["asin"]]
    return {"seconds": time.perf_counter() - began, "memory_mb": private_memory() - memory}


def write_json(shop: ShopCatalog, path: Path) -> None:
    """The products and goals of a shop as one JSON file."""
    encoder = msgspec.json.Encoder()
    with open(path, "wb") as file:
        for opening, count, get in (
            (b"[[", len(shop), shop.product),
            (b"],[", shop.goal_count, shop.goal),
        ):
            file.write(opening)
            for number in range(count):
                file.write((b"," if number else b"") + encoder.encode(get(number)))
        file.write(b"]]")


def fresh(what: str, folder: Path, rounds: int) -> dict[str, float]:
    """The median of several new processes."""
    command = [sys.executable, __file__, "--measure", what, "--folder", str(folder)]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(rounds)
    ]
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def measure(size: int, place: Path, rounds: int) -> dict[str, Any]:
    """Build a shop of a size, then open it both ways."""
    folder, began = place / f"shop-{size}", time.perf_counter()
    synthetic_shop(size, out=folder)
    built = time.perf_counter() - began
    beside = place / f"json-{size}"
    beside.mkdir(exist_ok=True)
    write_json(ShopCatalog.open(folder), beside / "shop.json")
    ours = fresh("built", folder, rounds)
    theirs = fresh("json", beside, 1 if size >= 1_000_000 else rounds)
    return {
        "build_seconds": round(built, 2),
        "folder_mb": round(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 1e6, 1),
        "json_mb": round((beside / "shop.json").stat().st_size / 1e6, 1),
        "built": {key: round(value, 5) for key, value in ours.items()},
        "json": {key: round(value, 5) for key, value in theirs.items()},
        "times_sooner": round(theirs["seconds"] / ours["seconds"], 1),
        "times_less_memory": round(theirs["memory_mb"] / max(ours["memory_mb"], 0.1), 1),
    }


def main() -> None:
    """Measure each size, print a table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3, help="processes for each figure")
    parser.add_argument("--folder", type=Path, help="keep the shops here, and use those that are there")
    parser.add_argument("--quick", action="store_true", help="300 and 1,000 products, one process each")
    parser.add_argument("--measure", choices=["built", "json"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps((open_built if options.measure == "built" else load_json)(options.folder)))
        return
    if options.quick:
        options.sizes, options.rounds = [300, 1_000], 1
    with tempfile.TemporaryDirectory() as temporary:
        place = options.folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        _report(options, place)


def _report(options: argparse.Namespace, place: Path) -> None:
    heads = (
        "products",
        "folder MB",
        "open s",
        "1st search s",
        "own MB",
        "JSON s",
        "JSON MB",
        "sooner",
        "less memory",
    )
    print("".join(f"{head:>13}" for head in heads))
    table = {}
    for size in options.sizes:
        row = table[str(size)] = measure(size, place, options.rounds)
        ours, theirs = row["built"], row["json"]
        print(
            f"{size:>13,}{row['folder_mb']:>13,.1f}{ours['seconds']:>13.4f}{ours['first_search_seconds']:>13.4f}"
            f"{ours['memory_mb']:>13.1f}{theirs['seconds']:>13.3f}{theirs['memory_mb']:>13.1f}"
            f"{row['times_sooner']:>12.1f}x{row['times_less_memory']:>12.1f}x",
            flush=True,
        )
    print(json.dumps({"benchmark": "shop_start", "rounds": options.rounds, "sizes": table}))


if __name__ == "__main__":
    main()
