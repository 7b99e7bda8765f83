"""A custom reward in addition to the environment's, and a run that trains on both.

python examples/custom_reward.py [KEY=VALUE ...]

A reward is a function of a finished episode. It runs in worker processes with a timeout: if it hangs or
crashes, that episode is lost, not the run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rollgym.core.types import Episode
from rollgym.trainer.main import run_training


def brevity(episode: Episode) -> float:
    """Up to 0.2 for a quick success; 0 without success."""
    return 0.2 / max(episode.length, 1) if episode.success else 0.0


def main(settings: list[str]) -> None:
    """Train on FrozenLake with it and print the held-out success."""
    folder = Path("runs") / time.strftime("brevity-%Y%m%d-%H%M%S")
    # Workers import the function by name, so they must be able to import this module.
    reward = "rewards=[{kind: function, target: 'custom_reward:brevity', workers: 1}]"
    summary = run_training("frozen-lake-grpo", [reward, *settings], folder, plain=True)
    end = summary["evaluations"][-1]
    print(f"held-out success {end['success_rate']:.2f} after {summary['steps']} steps ({folder})")


if __name__ == "__main__":
    main(sys.argv[1:])
