"""How many Sokoban levels the solver solves, and how soon.

    python benchmarks/sokoban_solver.py --levels boxoban.txt --limit 1000 --seconds 10

Without ``--levels`` it solves new levels of the 10x10 preset. Every solution is played through before it
counts. The last line is the result as one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rollgym.core.tasks import TaskSet
from rollgym.envs.sokoban.env import generated
from rollgym.envs.sokoban.game import Game
from rollgym.envs.sokoban.levels import load_levels
from rollgym.envs.sokoban.options import PRESETS
from rollgym.envs.sokoban.solver import FAST_WEIGHT, Result, solve

MARKS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
SEARCHES = {"shortest": 1, "fast": FAST_WEIGHT}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--levels", type=Path, help="a Boxoban or XSB file")
    parser.add_argument("--limit", type=int, default=1000, help="solve at most this many levels")
    parser.add_argument("--seconds", type=float, default=10.0, help="give up on a level after this time")
    parser.add_argument("--search", choices=[*SEARCHES, "both"], default="both")
    parser.add_argument("--quick", action="store_true", help="50 levels, one second each")
    options = parser.parse_args()
    if options.quick:
        options.limit, options.seconds = min(options.limit, 50), min(options.seconds, 1.0)
    return options


def boards(options: argparse.Namespace) -> list[str]:
    """The levels to solve."""
    if options.levels is not None:
        return [level.text for level in load_levels(options.levels)[: options.limit]]
    rules = PRESETS["10x10"]
    tasks = TaskSet(rules.name)
    return [generated(rules, tasks.task("train", index)).text for index in range(options.limit)]


def solves(text: str, result: Result) -> bool:
    """True if the path leads from the level to a solved board, one step each."""
    game = Game(text, max_steps=result.moves + 1)
    moved = [game.step(" UDLR".index(letter)).moved_player for letter in result.path.upper()]
    return all(moved) and game.solved


def measure(texts: list[str], weight: int, seconds: float) -> dict[str, Any]:
    """Solve every level once and count by when."""
    times: list[float] = []
    results: list[Result] = []
    for text in texts:
        began = time.perf_counter()
        result = solve(text, weight=weight, time_limit=seconds)
        took = time.perf_counter() - began
        results.append(result)
        if result.solved:
            assert solves(text, result), f"a wrong solution: {result.path}\n{text}"
            times.append(took)
    solved = [result for result in results if result.solved]
    marks = [mark for mark in MARKS if mark <= seconds]
    return {
        "weight": weight,
        "levels": len(texts),
        "outcomes": dict(Counter(result.status for result in results)),
        "solved_by": {str(mark): sum(t <= mark for t in times) / len(texts) for mark in marks},
        "median_seconds": statistics.median(times) if times else None,
        "max_seconds": max(times, default=None),
        "mean_moves": statistics.fmean(r.moves for r in solved) if solved else None,
        "mean_pushes": statistics.fmean(r.pushes for r in solved) if solved else None,
        "mean_nodes": statistics.fmean(r.nodes for r in results),
    }


def main() -> None:
    """Measure, print a table, then JSON."""
    options = arguments()
    texts = boards(options)
    chosen = SEARCHES if options.search == "both" else {options.search: SEARCHES[options.search]}
    source = options.levels.name if options.levels else "new 10x10 levels"
    print(f"{len(texts)} levels ({source}), {options.seconds:g} s each; share solved by:")
    table: dict[str, dict[str, Any]] = {}
    for name, weight in chosen.items():
        row = table[name] = measure(texts, weight, options.seconds)
        if len(table) == 1:
            print(
                f"{'search':10}"
                + "".join(f"{mark + ' s':>9}" for mark in row["solved_by"])
                + "    moves    nodes"
            )
        shares = "".join(f"{share:>9.1%}" for share in row["solved_by"].values())
        print(f"{name:10}{shares}{row['mean_moves'] or 0:>9.1f}{row['mean_nodes']:>9.0f}", flush=True)
    print(json.dumps({"benchmark": "sokoban_solver", "source": source, "searches": table}))


if __name__ == "__main__":
    main()
