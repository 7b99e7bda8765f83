"""A device plan, and a run on Ray that follows it.

python examples/ray_plan.py [KEY=VALUE ...]

The two GPUs are logical: Ray counts them but nothing uses them, so a layout can be tried on a laptop. The
learner gets one device, the engine the other. Needs `pip install -e '.[train,distributed]'`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rollgym.trainer.cluster.workload import plan_training
from rollgym.trainer.main import run_training

CONFIG = "frozen-lake-grpo"
DEVICES = ["devices.layout=split", "devices.actor_train=gpu[0]", "devices.actor_infer=gpu[1]"]


def main(settings: list[str]) -> Path:
    """Print the plan, train, print the held-out success; returns the run folder."""
    plan = plan_training(CONFIG, [*DEVICES, *settings], cluster="2xH100").plan
    print(f"layout: {plan.layout}")
    for role, placement in plan.placements.items():
        print(f"  {role:12} on {len(placement.devices)} device(s)")

    folder = Path("runs") / time.strftime("on-ray-%Y%m%d-%H%M%S")
    words = ["runtime=ray", "ray.num_gpus=2", *DEVICES, *settings]
    summary = run_training(CONFIG, words, folder, plain=True)
    end = summary["evaluations"][-1]
    print(f"held-out success {end['success_rate']:.2f} after {summary['steps']} steps ({folder})")
    return folder


if __name__ == "__main__":
    main(sys.argv[1:])
