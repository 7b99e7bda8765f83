"""Compare two agents on the same tasks, with a confidence interval and a p-value.

python examples/compare_agents.py [ENV] [EPISODES]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rollgym.evaluation.compare import compare_runs
from rollgym.evaluation.runner import Request, evaluate


def main(env: str = "rollgym/FrozenLake-v0", episodes: int = 60) -> None:
    """Print each agent's success with its interval, then the paired difference."""
    with tempfile.TemporaryDirectory() as root:
        folders = []
        for agent in ("expert", "random"):
            folder = Path(root) / agent
            # The same seed gives both agents the same tasks.
            summary = evaluate(
                Request(env_id=env, agent=agent, episodes=episodes, seed=0, split="test"), folder
            )
            low, high = summary["success_ci"]
            print(f"{agent:8} {summary['success_rate']:.3f} [{low:.3f}, {high:.3f}]")
            folders.append(folder)
        success = compare_runs(*folders)["success"]
        interval = f"[{success['low']:.3f}, {success['high']:.3f}]"
        print(f"difference {success['difference']:.3f} {interval}, p = {success['p_value']:.2g}")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
