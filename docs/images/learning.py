"""Draw learning curves from runs, and print the rows of docs/learning.md for them.

    rollgym train sokoban-ppo seed=1 --out runs/sokoban-ppo-s1
    python docs/images/learning.py sokoban-ppo "Sokoban 6x6, PPO" runs/sokoban-ppo-s*

The picture is docs/images/learning-NAME.svg. Runs are labelled by their seeds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rollgym.config import parse
from rollgym.trainer.picture import learning_curve


def evaluations(run: Path) -> list[dict[str, Any]]:
    """What was measured on held-out tasks, from after the warm start on."""
    lines = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] != "before"]


def row(run: Path, seed: int) -> str:
    """A row of the table: before and after with intervals, the best, and how long it took."""
    lines = evaluations(run)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    best = max(line["success_rate"] for line in lines)
    shown = [
        f"{line['success_rate']:.2f} [{line['success_ci'][0]:.2f}, {line['success_ci'][1]:.2f}]"
        for line in (first, last)
    ]
    seconds = json.loads((run / "summary.json").read_text())["seconds"]
    return f"| | {seed} | {shown[0]} | {shown[1]} | {best:.2f} | {len(metrics)} steps, {seconds:.0f} s |"


def main() -> None:
    """Write the picture, print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("title")
    parser.add_argument("runs", type=Path, nargs="+")
    given = parser.parse_args()
    seeds = {run: parse((run / "config.yaml").read_text())["seed"] for run in given.runs}
    curves = {f"seed {seed}": evaluations(run) for run, seed in seeds.items()}
    picture = Path(__file__).parent / f"learning-{given.name}.svg"
    picture.write_text(learning_curve(curves, given.title), encoding="utf-8")
    for run, seed in seeds.items():
        print(row(run, seed))


if __name__ == "__main__":
    main()
