"""Time and memory of GRPO steps with LoRA on SmolLM2-135M-Instruct, against a limit of 8 GB.

    python benchmarks/smollm_step.py [--quick] [--steps 2] [--threads N] [--limit-gb 8] [SETTING=VALUE ...]

Runs ``rollgym train smollm-grpo`` in a separate process: rollouts by the embedded engine, the update by the
learner, the new weights back into the engine. ``step_seconds`` are those of each step as the run records
them, with what they were spent on; ``cpu_seconds`` is the whole process, start and evaluations included;
``peak_gb`` is the greatest resident set of the process or a child of it, as the system counts it. ``ratio``
is the limit over the peak: above 1, the step fits. Exit code 1 where it does not.

``--quick`` makes one step of two small groups, and one evaluation episode. The first run fetches the weights.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollgym.models.zoo import model_folder

QUICK = ["rollout.groups=2", "rollout.group_size=2", "evaluation.episodes=1"]


def train(out: Path, steps: int, words: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a run."""
    command = [sys.executable, "-m", "rollgym", "train", "smollm-grpo", "--out", str(out), "--plain"]
    began = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, f"stop.steps={steps}", "evaluation.every=0", *words], text=True, stdout=sys.stderr
    )
    if done.returncode:
        raise SystemExit(f"the run ended with exit code {done.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def read_steps(out: Path) -> list[dict[str, Any]]:
    """What the run recorded of each step."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run, and put the figures together."""
    model_folder("smollm2")
    words = [*(QUICK if args.quick else []), *args.settings]
    if args.threads:
        words += [f"engine.threads={args.threads}", f"learner.threads={args.threads}"]
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        wall, cpu = train(out, 1 if args.quick else args.steps, words)
        steps = read_steps(out)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    return {
        "benchmark": "smollm_step",
        "settings": words,
        "steps": steps,
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_gb": round(peak, 2),
        "limit_gb": args.limit_gb,
        "ratio": round(args.limit_gb / peak, 2),
    }


def main() -> None:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--limit-gb", type=float, default=8.0)
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    result = measure(parser.parse_args())
    print(json.dumps(result))
    sys.exit(result["ratio"] < 1)


if __name__ == "__main__":
    main()
