"""A custom advantage estimator, and a run that trains with it.

python examples/custom_estimator.py [KEY=VALUE ...]

An estimator is a function from trajectories to one advantage per action token. Everything else (losses,
batches, evaluation, checkpoints) stays the same, and it is chosen by name like any other.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollgym.trainer.advantages import AdvantageConfig, FloatArray, Trajectory, register_estimator
from rollgym.trainer.main import run_training


@register_estimator(centered=True)
def by_rank(batch: Sequence[Trajectory], settings: AdvantageConfig) -> tuple[list[FloatArray], None]:
    """Rank within the group, from -1 for the worst to 1 for the best; equal scores share a rank."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number, trajectory in enumerate(batch):
        groups[trajectory.group].append(number)
    ranks = np.zeros(len(batch))
    for members in groups.values():
        scores = np.array([batch[number].score for number in members])
        worse = (scores[:, None] > scores[None, :]).sum(axis=1)
        better = (scores[:, None] < scores[None, :]).sum(axis=1)
        ranks[members] = (worse - better) / max(len(members) - 1, 1)
    tokens = [int(trajectory.tokens.sum()) for trajectory in batch]
    return [np.full(count, value) for count, value in zip(tokens, ranks, strict=True)], None


def main(settings: list[str]) -> None:
    """Train on the bandit and print the held-out success."""
    folder = Path("runs") / time.strftime("by-rank-%Y%m%d-%H%M%S")
    summary = run_training("bandit-grpo", ["estimator=by_rank", *settings], folder, plain=True)
    start = next(line for line in summary["evaluations"] if line["phase"] == "warm_start")
    end = summary["evaluations"][-1]
    print(f"held-out success: {start['success_rate']:.2f} -> {end['success_rate']:.2f} ({folder})")


if __name__ == "__main__":
    main(sys.argv[1:])
