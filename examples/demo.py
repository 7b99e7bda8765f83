"""The demo: a random agent and the expert on Sokoban and FrozenLake, with intervals and a comparison.

make demo
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rollgym.comparison import compare_runs
from rollgym.evaluate import Request, evaluate

ENVS = ("rollgym/Sokoban-v0", "rollgym/FrozenLake-v0")
EPISODES = 200


def main(screen: Console | None = None) -> None:
    started = time.time()
    folder = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    screen = screen or Console()
    table = Table("environment", "agent", "success", "", "95 % interval", "return", "turns", box=None)
    results: dict[str, dict[str, float]] = {}
    for env_id in ENVS:
        name = env_id.removeprefix("rollgym/")
        for agent in ("random", "expert"):
            with screen.status(f"{agent} plays {EPISODES} episodes of {name}"):
                request = Request(env_id=env_id, agent=agent, episodes=EPISODES, seed=1, workers=2)
                summary = evaluate(request, folder / f"{name}-{agent}")
            low, high = summary["success_ci"]
            table.add_row(
                name,
                agent,
                f"{summary['success_rate']:.3f}",
                "█" * round(20 * summary["success_rate"]),
                f"[{low:.3f}, {high:.3f}]",
                f"{summary['mean_return']:.2f}",
                f"{summary['length']['mean']:.1f}",
            )
            results.setdefault(env_id, {})[agent] = summary["success_rate"]
    screen.print(table)
    for env_id in ENVS:
        name = env_id.removeprefix("rollgym/")
        both = compare_runs(folder / f"{name}-expert", folder / f"{name}-random")["success"]
        screen.print(
            f"{name}: on the same {both['tasks']} tasks the expert succeeds {both['difference']:+.1%} more "
            f"often than random (95 % interval {both['low']:+.1%} to {both['high']:+.1%}, "
            f"p = {both['p_value']:.4f})",
            highlight=False,
        )
    screen.print(f"\nEvery episode is in {folder}/. Next: rollgym play rollgym/Sokoban-v0", highlight=False)
    print(json.dumps({"success": results, "seconds": round(time.time() - started, 1), "run": str(folder)}))


if __name__ == "__main__":
    main()
