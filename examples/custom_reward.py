"""A reward of one's own beside the environment's, and a run that trains on both.

python examples/custom_reward.py [KEY=VALUE ...]

A reward is a function of a finished episode. It runs in worker processes, with a deadline: one that hangs or
crashes costs that episode, not the run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rollgym.trainer.command import run_training
from rollgym.types import Episode


def brevity(episode: Episode) -> float:
    """Up to 0.2 for getting there quickly; nothing for not getting there."""
    return 0.2 / max(episode.length, 1) if episode.success else 0.0


def main(settings: list[str]) -> None:
    """Train on FrozenLake with it, and say what the last step earned."""
    folder = Path("runs") / time.strftime("brevity-%Y%m%d-%H%M%S")
    # Workers find the function by its module's name, so the module must be importable there, too.
    reward = "rewards=[{kind: function, target: 'custom_reward:brevity', workers: 1}]"
    summary = run_training("frozen-lake-grpo", [reward, *settings], folder, plain=True)
    end = summary["evaluations"][-1]
    print(f"held-out success {end['success_rate']:.2f} after {summary['steps']} steps ({folder})")


if __name__ == "__main__":
    main(sys.argv[1:])
