"""Memory and time of tasks from a large data file, in each format.

    python benchmarks/data_rows.py [--quick] [--rows 1000000] [--tasks 2000]

Each format is written to a temporary folder and opened as ``rollgym/Data-v0`` in a fresh process, twice: the
first builds the index, the second finds it in the cache. ``memory_mb`` is the peak resident memory above that
of the same process with the embedded data. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FORMATS = ("jsonl", "parquet", "arrow")
_CHUNK = 50_000
_TEXT = "A question of a few sentences, so that a row has the length that rows of word problems have. " * 3


def write(path: Path, rows: int) -> None:
    """Write a file of numbered questions, a chunk at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def chunk(start: int) -> dict[str, list[str]]:
        numbers = range(start, min(start + _CHUNK, rows))
        return {
            "question": [f"Number {number}: {_TEXT}How much is {number} + 1?" for number in numbers],
            "answer": [str(number + 1) for number in numbers],
        }

    schema = pa.schema({"question": pa.string(), "answer": pa.string()})
    starts = range(0, rows, _CHUNK)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            for start in starts:
                columns = chunk(start)
                for question, answer in zip(columns["question"], columns["answer"], strict=True):
                    file.write(json.dumps({"question": question, "answer": answer}) + "\n")
    elif path.suffix == ".parquet":
        with pq.ParquetWriter(path, schema) as writer:
            for start in starts:
                writer.write_table(pa.table(chunk(start), schema))
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for start in starts:
                writer.write_table(pa.table(chunk(start), schema), max_chunksize=1000)


def play(path: str, tasks: int) -> dict[str, float]:
    """Open a file as an environment and play random tasks; runs in its own process."""
    import rollgym

    kwargs = {"columns": {"prompt": "question"}, "judge": "number"}
    started = time.perf_counter()
    env = rollgym.make("rollgym/Data-v0", **({"data": path, **kwargs} if path else {}))
    opened = time.perf_counter()
    for seed in range(tasks):
        env.reset(seed=seed)
        env.step("1")
    played = time.perf_counter()
    # VmHWM belongs to this program; ru_maxrss would include the process that started it.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "open_seconds": round(opened - started, 2),
        "ms_per_task": round(1000 * (played - opened) / tasks, 3),
        "peak_mb": round(int(status["VmHWM"].split()[0]) / 1024, 1),
    }


def measure(path: str, tasks: int, cache: Path) -> dict[str, float]:
    """The figures of a fresh process."""
    command = [sys.executable, __file__, "--play", path, "--tasks", str(tasks)]
    environment = {**os.environ, "ROLLGYM_CACHE": str(cache)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    """Write, open and play each format."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tasks", type=int, default=2_000)
    parser.add_argument("--play", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play is not None:
        print(json.dumps(play(args.play, args.tasks)))
        return
    if args.quick:
        args.rows, args.tasks = 100_000, 200
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = measure("", args.tasks, Path(folder, "cache"))["peak_mb"]
        for name in FORMATS:
            path = Path(folder, f"rows.{name}")
            write(path, args.rows)
            first, again = (measure(str(path), args.tasks, Path(folder, "cache")) for _ in range(2))
            results[name] = {
                "file_mb": round(path.stat().st_size / 1e6, 1),
                "memory_mb": round(max(first["peak_mb"], again["peak_mb"]) - base, 1),
                "open_seconds": first["open_seconds"],
                "open_again_seconds": again["open_seconds"],
                "ms_per_task": again["ms_per_task"],
            }
            print(f"{name:8} {results[name]}", flush=True)
            path.unlink()
    memory = max(result["memory_mb"] for result in results.values())
    print(json.dumps({"benchmark": "data_rows", "rows": args.rows, "memory_mb": memory, "formats": results}))


if __name__ == "__main__":
    main()
