"""Draw learning curves from runs, and print the rows of docs/learning.md for them.

    rollgym train sokoban-ppo seed=1 --out runs/sokoban-ppo-s1
    python docs/images/learning.py sokoban-ppo "Sokoban 6x6, PPO" runs/sokoban-ppo-s*

The picture is docs/images/learning-NAME.svg. Runs are labeled by their seeds; of runs with several
environments, each one has a curve and a row.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from docs.images.learning_curve import learning_curve
from rollgym.config.loader import parse
from rollgym.io.run_dir import SUMMARY, read_json


def evaluations(summary: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Results on held-out tasks by environment, from the end of the warm start on."""
    by_env: dict[str, list[dict[str, Any]]] = {}
    for line in summary["evaluations"]:
        if line["phase"] != "before":
            by_env.setdefault(line["env"], []).append(line)
    return by_env


def row(name: str, lines: list[dict[str, Any]], summary: dict[str, Any], seed: int) -> str:
    """A row of the table: before and after with intervals, the best, and how long it took."""
    best = max(line["success_rate"] for line in lines)
    rates = [
        f"{line['success_rate']:.2f} [{line['success_ci'][0]:.2f}, {line['success_ci'][1]:.2f}]"
        for line in (lines[0], lines[-1])
    ]
    duration = f"{summary['steps']} steps, {summary['seconds']:.0f} s"
    return f"| {name} | {seed} | {rates[0]} | {rates[1]} | {best:.2f} | {duration} |"


def main() -> None:
    """Write the picture, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("title")
    parser.add_argument("runs", type=Path, nargs="+")
    args = parser.parse_args()
    runs = {parse((run / "config.yaml").read_text())["seed"]: read_json(run / SUMMARY) for run in args.runs}
    results = {
        (f"{env.removeprefix('rollgym/')} " if len(evaluations(summary)) > 1 else "", seed): lines
        for seed, summary in runs.items()
        for env, lines in evaluations(summary).items()
    }
    curves = {f"{env}seed {seed}": lines for (env, seed), lines in results.items()}
    picture = Path(__file__).parent / f"learning-{args.name}.svg"
    picture.write_text(learning_curve(curves, args.title), encoding="utf-8")
    for (env, seed), lines in results.items():
        print(row(env.strip(), lines, runs[seed], seed))


if __name__ == "__main__":
    main()
