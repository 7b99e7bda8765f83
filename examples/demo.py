"""The demo: a language model learns FrozenLake, by imitation and then by reinforcement learning.

make demo       a policy of 0.1 million parameters, from random weights
make demo-lm    SmolLM2-135M-Instruct, a pretrained language model

Model, engine, environments and trainer run in one process on the CPU. Success is measured on held-out lakes:
before training, after the warm start and after reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rollgym.evaluation.runner import Request, evaluate
from rollgym.trainer.config import load_recorded
from rollgym.trainer.main import run_training
from rollgym.view import export

CONFIG = "frozen-lake-gigpo"
PHASES = {"before": "untrained", "warm_start": "after imitation", "after": "after reinforcement learning"}


def main(arguments: list[str] | None = None, screen: Console | None = None) -> None:
    """Train, compare with the random agent and the expert, and write a report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings to override")
    parser.add_argument("--config", default=CONFIG, help=f"name of a FrozenLake config (default: {CONFIG})")
    parser.add_argument("--plain", action="store_true", help="print lines instead of a live panel")
    args = parser.parse_args(arguments)
    started = time.time()
    name = "demo" if args.config == CONFIG else args.config
    folder = Path("runs") / time.strftime(f"{name}-%Y%m%d-%H%M%S")
    screen = screen or Console()
    trained = run_training(args.config, args.settings, folder, plain=args.plain)
    config = load_recorded(folder / "config.yaml")
    phases = {line["phase"]: line for line in trained["evaluations"]}
    results = {phase: _numbers(phases[phase]) for phase in PHASES}
    others = {}
    for agent in ("random", "expert"):
        request = Request(
            env_id=config.envs[0].id,
            env_kwargs=config.envs[0].kwargs,
            agent=agent,
            episodes=config.evaluation.episodes,
            split=config.evaluation.split,
            seed=config.evaluation.seed,
        )
        others[agent] = _numbers(evaluate(request, folder / agent))
    _show(screen, results, others)
    page = export(folder, folder / "report.html").path
    screen.print(f"\nReport: {page}", highlight=False)
    screen.print(f"Next: rollgym trace {folder}, or rollgym train {args.config} seed=1", highlight=False)
    print(json.dumps({**results, **others, "seconds": round(time.time() - started, 1), "run": str(folder)}))


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    low, high = line["success_ci"]
    return {"success": line["success_rate"], "low": low, "high": high}


def _show(screen: Console, results: dict[str, Any], others: dict[str, Any]) -> None:
    table = Table("policy", "success on held-out lakes", "", "95 % interval", box=None)
    rows = {"random agent": others["random"]}
    rows |= {PHASES[phase]: result for phase, result in results.items()} | {"expert": others["expert"]}
    for name, result in rows.items():
        bar = "█" * round(20 * result["success"])
        table.add_row(name, f"{result['success']:.3f}", bar, f"{result['low']:.3f} to {result['high']:.3f}")
    screen.print(table)


if __name__ == "__main__":
    main()
