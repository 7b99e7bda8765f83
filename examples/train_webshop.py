"""Train a small language model on WebShop, in a generated shop.

python examples/train_webshop.py [KEY=VALUE ...]

About ten minutes on two cores. Needs `pip install -e '.[train,webshop]'`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rollgym.evaluation.run_results import load_run
from rollgym.evaluation.runner import Request, evaluate
from rollgym.trainer.main import run_training
from rollgym.view import export

SHOP = {"shop": "simple:500", "observation": "compact", "max_turns": 8}


def main(settings: list[str], episodes: int = 100) -> Path:
    """Train, compare with the random agent and the expert, write the report; returns the run folder."""
    folder = Path("runs") / time.strftime("webshop-%Y%m%d-%H%M%S")
    summary = run_training("webshop-grpo", settings, folder, plain=True)
    for agent in ("random", "expert"):
        request = Request(env_id="rollgym/WebShop-v0", env_kwargs=SHOP, agent=agent, episodes=episodes)
        print(f"{agent:10} {evaluate(request, folder / agent)['success_rate']:.2f}")
    for line in summary["evaluations"]:
        low, high = line["success_ci"]
        print(f"{line['phase']:10} {line['success_rate']:.2f} [{low:.2f}, {high:.2f}]")

    *_, visit = load_run(folder).episodes
    print(f"\nthe last visit: {visit.spec.task}, reward {visit.total_reward:.2f}")
    for turn in visit.turns:
        print("  >", turn.action)
    print(f"report: {export(folder, folder / 'report.html').path}")
    return folder


if __name__ == "__main__":
    main(sys.argv[1:])
