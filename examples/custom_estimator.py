"""A way of giving credit of one's own, and a run that trains with it.

python examples/custom_estimator.py [KEY=VALUE ...]

An estimator is a function: trajectories in, one advantage for each action token out. Everything else (losses,
batches, evaluation, checkpoints) stays as it is, and it is chosen by its name like any other.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollgym.trainer.command import run_training
from rollgym.trainer.credit import Trajectory, estimator
from rollgym.trainer.credit_types import CreditSettings, FloatArray


@estimator(centred=True)
def by_rank(batch: Sequence[Trajectory], settings: CreditSettings) -> tuple[list[FloatArray], None]:
    """Only the order within a group counts, from -1 for the worst to 1 for the best; equals share a place."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number, trajectory in enumerate(batch):
        groups[trajectory.group].append(number)
    worth = np.zeros(len(batch))
    for members in groups.values():
        scores = np.array([batch[number].score for number in members])
        worse = (scores[:, None] > scores[None, :]).sum(axis=1)
        better = (scores[:, None] < scores[None, :]).sum(axis=1)
        worth[members] = (worse - better) / max(len(members) - 1, 1)
    tokens = [int(trajectory.tokens.sum()) for trajectory in batch]
    return [np.full(count, value) for count, value in zip(tokens, worth, strict=True)], None


def main(settings: list[str]) -> None:
    """Train the bandit with it, and say what came of it."""
    folder = Path("runs") / time.strftime("by-rank-%Y%m%d-%H%M%S")
    summary = run_training("bandit-grpo", ["estimator=by_rank", *settings], folder, plain=True)
    start = next(line for line in summary["evaluations"] if line["phase"] == "warm_start")
    end = summary["evaluations"][-1]
    print(f"held-out success: {start['success_rate']:.2f} -> {end['success_rate']:.2f} ({folder})")


if __name__ == "__main__":
    main(sys.argv[1:])
