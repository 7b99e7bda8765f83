"""Two agents on the same tasks: who is better, and how sure is that?

python examples/compare_agents.py [ENV] [EPISODES]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rollgym.comparison import compare_runs
from rollgym.evaluate import Request, evaluate


def main(env: str = "rollgym/FrozenLake-v0", episodes: int = 60) -> None:
    """Play, print each agent's success with its interval, then the paired difference."""
    with tempfile.TemporaryDirectory() as place:
        folders = []
        for agent in ("expert", "random"):
            folder = Path(place) / agent
            # The same seed: both play the very same tasks.
            summary = evaluate(
                Request(env_id=env, agent=agent, episodes=episodes, seed=0, split="test"), folder
            )
            low, high = summary["success_ci"]
            print(f"{agent:8} {summary['success_rate']:.3f} [{low:.3f}, {high:.3f}]")
            folders.append(folder)
        found = compare_runs(*folders)["success"]
        interval = f"[{found['low']:.3f}, {found['high']:.3f}]"
        print(f"difference {found['difference']:.3f} {interval}, p = {found['p_value']:.2g}")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
