"""A simulated training run against the same run for real: step time, staleness and discarded turns.

    python benchmarks/simulation.py [--steps 25] [--quick]

FrozenLake with waiting environments, one task in ten slow (`benchmarks/async_training.py`, part
``policies``), an untrained built-in policy, GRPO. Each policy of `rollout.on_stale` runs for real and is then
simulated twice: with the latencies recorded in the same run, and with those of the synchronous run, which is
a prediction. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

POLICIES = {
    "synchronous": [],
    "wait": ["rollout.max_staleness=2", "rollout.on_stale=wait"],
    "replay": ["rollout.max_staleness=2", "rollout.on_stale=replay"],
    "mask": ["rollout.max_staleness=2", "rollout.on_stale=mask"],
}
SKIP = 4
"""First steps that are left out: the run is not in full swing yet."""


def settings(args: argparse.Namespace) -> list[str]:
    """What differs from `frozen-lake-grpo`, but for the policy."""
    return [
        f"stop.steps={args.steps}",
        "warm_start=null",
        "model.size=tiny",
        "evaluation.on_start=false",
        f"evaluation.every={args.steps}",
        "evaluation.episodes=2",
        f"checkpoints.every={args.steps}",
        "rollout.workers=1",
        f"rollout.groups={args.groups}",
        "rollout.group_size=4",
        f"rollout.max_in_flight={12 * args.groups}",
        "learner.old_logprobs=recompute",
        "tracking.tensorboard=false",
        "tracking.tokens_every=0",
        "envs=[{id: 'async_training:TailLake', limits: {turns: 6, seconds: 600}}]",
        "imports=[async_training]",
    ]


def measured(folder: Path) -> dict[str, float]:
    """Mean step, staleness and discarded turns of a real run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][SKIP:]
    discarded = sum(line.get("turns_discarded", 0.0) for line in lines)
    trained = sum(line["length"] * line["episodes"] for line in lines)
    return {
        "step": sum(line["seconds"] for line in lines) / len(lines),
        "staleness": sum(line["staleness"] for line in lines) / len(lines),
        "discarded": discarded / (discarded + trained),
    }


def simulated(args: argparse.Namespace, words: list[str], run: Path) -> dict[str, float]:
    """The same of a simulated run, with the real scheduler and the latencies of a recorded run."""
    from rollgym.simulation.samples import ages, discarded_share, mean, mean_age
    from rollgym.trainer.simulation import SimulationRequest, simulate_training

    request = SimulationRequest(
        config="frozen-lake-grpo",
        overrides=[*settings(args), *words],
        latencies=[str(run)],
        steps=args.steps,
        level="events",
        variants=False,
        days=0.01,
    )
    samples = simulate_training(request).base.samples
    return {
        "step": mean(sample.seconds for sample in samples),
        "staleness": mean(mean_age(ages([sample])) for sample in samples),
        "discarded": discarded_share(samples),
    }


def main() -> None:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="Six steps of two policies: does it run at all?")
    args = parser.parse_args()
    if args.quick:
        args.steps = 6
    sys.path.insert(0, str(Path(__file__).parent))
    from rollgym.trainer.main import run_training

    result: dict[str, Any] = {"benchmark": "simulation", "policies": {}}
    with tempfile.TemporaryDirectory() as place:
        for name, words in list(POLICIES.items())[: 2 if args.quick else None]:
            folder = Path(place, name)
            run_training("frozen-lake-grpo", [*settings(args), *words], folder, plain=True)
            real = measured(folder)
            found = {
                "measured": real,
                "own latencies": simulated(args, words, folder),
                "latencies of the synchronous run": simulated(args, words, Path(place, "synchronous")),
            }
            result["policies"][name] = found
            for kind, one in found.items():
                error = one["step"] / real["step"] - 1
                print(
                    f"{name:12} {kind:33} step {one['step']:6.2f} s ({error:+.1%})   "
                    f"staleness {one['staleness']:.2f}   turns discarded {one['discarded']:.1%}",
                    flush=True,
                )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
