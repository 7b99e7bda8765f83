"""What a search of the shop costs: CPU time per query, for both engines, by the size of the catalog.

    python benchmarks/shop_search.py [--quick] [--sizes 1000,100000,1000000] [--queries 300] [--keep FOLDER]

Documents have 40 to 80 words out of 100,000, the r-th as frequent as 1/r (about). Short queries have 3 to 6
words, long ones 12 to 24, as when an agent searches for its whole instruction; words of queries are drawn as
those of documents are, the most frequent ones included. Every query is asked of both engines, in turn, so
that both see the same machine; no query comes twice, so that nothing is answered from memory. An index is
built in a separate process; its CPU time includes making up the documents. With ``--keep`` the indexes stay
in that folder, and are not built again. The goal is a p99 below 20 ms at 1,000,000 documents with tantivy.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from rollgym.envs.webshop.search import ENGINES, build_search, open_search

WORDS = 100_000
BLOCK = 2_000
KINDS = {"short": (3, 7), "long": (12, 25)}
SYLLABLES = [first + vowel for first in "bdfgklmnprtvz" for vowel in "aeiou"]


def word(number: int) -> str:
    """The made-up word of a number."""
    text = ""
    while True:
        number, digit = divmod(number, len(SYLLABLES))
        text += SYLLABLES[digit]
        if not number:
            return text + "n"


def texts(seed: int, count: int, least: int, below: int) -> Iterator[str]:
    """Texts of ``least`` to ``below - 1`` words."""
    vocabulary = [word(number) for number in range(WORDS)]
    shares = np.cumsum(1 / np.arange(3, WORDS + 3))
    shares /= shares[-1]
    for block in range(0, count, BLOCK):
        rng = np.random.default_rng([seed, block])
        lengths = rng.integers(least, below, size=min(BLOCK, count - block)).tolist()
        drawn = iter(np.searchsorted(shares, rng.random(sum(lengths))).tolist())
        for length in lengths:
            yield " ".join([vocabulary[next(drawn)] for _ in range(length)])


def build(folder: str, engine: str, size: int) -> tuple[float, float]:
    """Build an index; CPU seconds and the peak of memory in MB."""
    build_search(Path(folder), texts(0, size, 40, 81), engines=(engine,))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def built(folder: str, engine: str, size: int) -> dict[str, float]:
    """Build an index in a separate process, where there is none."""
    if (Path(folder) / engine).is_dir():
        return {}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        seconds, peak = pool.submit(build, folder, engine, size).result()
    disk = sum(path.stat().st_size for path in (Path(folder) / engine).iterdir()) / 1e6
    return {"build_cpu_s": round(seconds, 1), "build_peak_mb": round(peak), "disk_mb": round(disk, 1)}


def ask(folder: str, queries: list[str]) -> dict[str, list[float]]:
    """CPU milliseconds of each query, by engine, the engines in turn."""
    opened = {engine: open_search(Path(folder), engine) for engine in ENGINES}
    for search in opened.values():
        search.find("warm up " + queries[0])
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for query in queries:
        for engine, search in opened.items():
            start = time.process_time_ns()
            search.find(query)
            times[engine].append((time.process_time_ns() - start) / 1e6)
    return times


def measure(size: int, count: int, keep: Path | None) -> dict[str, Any]:
    """One size: both engines built, asked, compared."""
    with tempfile.TemporaryDirectory() as passing:
        folder = str(keep / str(size)) if keep else passing
        result: dict[str, Any] = {engine: built(folder, engine, size) for engine in ENGINES}
        for number, (kind, (least, below)) in enumerate(KINDS.items()):
            queries = list(dict.fromkeys(texts(1 + number, count, least, below)))
            for engine, times in ask(folder, queries).items():
                p50, p99 = np.percentile(times, [50, 99])
                result[engine][f"{kind}_p50_ms"] = round(float(p50), 3)
                result[engine][f"{kind}_p99_ms"] = round(float(p99), 3)
    return result


def main() -> None:
    """Measure every size and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1,000 and 10,000 documents, 50 queries")
    parser.add_argument("--sizes", default="1000,100000,1000000")
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--keep", type=Path, help="a folder for the indexes, to use them again")
    arguments = parser.parse_args()
    sizes = [1_000, 10_000] if arguments.quick else [int(size) for size in arguments.sizes.split(",")]
    results = {}
    for size in sizes:
        results[size] = measure(size, 50 if arguments.quick else arguments.queries, arguments.keep)
        for engine, figures in results[size].items():
            shown = "  ".join(f"{name} {value:,}" for name, value in figures.items())
            print(f"{size:>9,} {engine:<12}  {shown}", flush=True)
        for kind in KINDS:
            exact, fast = (results[size][engine][f"{kind}_p50_ms"] for engine in ENGINES)
            print(f"{size:>9,} {kind} queries: lucene-exact takes {exact / fast:.1f} times tantivy's time")
    print(json.dumps({"benchmark": "shop_search", "results": results}))


if __name__ == "__main__":
    main()
