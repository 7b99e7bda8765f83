"""Train a small language model on Sokoban and write a report.

python examples/train_sokoban.py [KEY=VALUE ...]

About seven minutes on two cores. The model imitates a noisy expert, then learns by reinforcement; success is
measured on held-out levels.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rollgym.evaluation.runner import Request, evaluate
from rollgym.trainer.main import run_training
from rollgym.view import export


def main(settings: list[str], episodes: int = 100) -> Path:
    """Train, evaluate the policy as an agent, write the report; returns the run folder."""
    folder = Path("runs") / time.strftime("sokoban-%Y%m%d-%H%M%S")
    summary = run_training("sokoban-ppo", settings, folder, plain=True)
    for line in summary["evaluations"]:
        low, high = line["success_ci"]
        print(f"{line['phase']:10} {line['success_rate']:.2f} [{low:.2f}, {high:.2f}]")

    # The trained policy is a model folder in Hugging Face format that any evaluation can use.
    request = Request(
        env_id="rollgym/Sokoban-v0",
        env_kwargs={"view": "relative", "end_when_lost": True, "tell_bumps": True},
        agent="lm",
        agent_options={
            "model": str(folder / "final"),
            "history": "none",
            "instructions": False,
            "max_tokens": 1,
        },
        episodes=episodes,
    )
    played = evaluate(request, folder / "played")
    print(f"as an agent, on the test split: {played['success_rate']:.2f}")
    print(f"report: {export(folder, folder / 'report.html').path}")
    return folder


if __name__ == "__main__":
    main(sys.argv[1:])
