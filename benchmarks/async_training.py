"""Training in turns against training while episodes play on, on an environment with a heavy tail.

    python benchmarks/async_training.py [--steps 40] [--staleness 1] [--svg docs/images/async.svg] [--quick]

FrozenLake whose steps take as long as a Pareto distribution says: most under a tenth of a second, some three.
Both ways begin with the same imitated policy and make the same number of updates of the same size; only
`rollout.max_staleness` differs. Wall-clock time covers the training steps only. Success is on held-out lakes,
with Wilson's interval. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rollgym.core.env import StepResult
from rollgym.envs.frozen_lake.env import FrozenLakeEnv
from rollgym.utils import svg

LEAST, SHAPE, MOST = 0.03, 1.1, 3.0
"""Seconds of a step: at least, the tail's exponent, at most."""


class SlowLake(FrozenLakeEnv):
    """FrozenLake on a machine that is sometimes busy."""

    pool_thread = "own"

    def respond(self, action: str) -> StepResult:
        """Move, after a while."""
        time.sleep(min(MOST, LEAST * (1.0 + float(self.np_random.pareto(SHAPE)))))
        return super().respond(action)


def settings(args: argparse.Namespace, start: Path | None, staleness: int) -> list[str]:
    """What differs from `frozen-lake-grpo`."""
    words = [
        f"stop.steps={args.steps}",
        f"evaluation.every={args.steps}",
        f"evaluation.episodes={60 if args.quick else 300}",
        f"rollout.max_staleness={staleness}",
        "rollout.workers=1",
        f"rollout.groups={args.groups}",
        f"rollout.max_in_flight={args.in_flight}",
        "learner.old_logprobs=recompute",
        "loss.entropy_coef=0",  # what it does at the end of a run differs from run to run
        "tracking.tensorboard=false",
    ]
    return words if start is None else [*words, f"model.path={start}", "warm_start=null"]


def train(out: Path, args: argparse.Namespace, start: Path | None, staleness: int) -> dict[str, Any]:
    """One run; returns its summary and where the time of its steps went."""
    from rollgym.trainer.main import run_training

    slow = "envs=[{id: 'async_training:SlowLake', limits: {turns: 20, seconds: 600}}]"
    imitate = start is None
    fast = [] if imitate else [slow, "imports=[async_training]"]
    summary = run_training(
        "frozen-lake-grpo",
        [*settings(args, start, staleness), *fast],
        out,
        imitate_only=imitate,
        plain=True,
    )
    metrics_file = out / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics_file.read_text().splitlines()] if not imitate else []
    split = {
        name: sum(line[f"seconds_{name}"] for line in steps)
        for name in ("generate", "environment", "train", "sync")
    }
    return {
        "seconds": sum(line["seconds"] for line in steps),
        "split": split,
        "staleness": sum(line["staleness"] for line in steps) / max(len(steps), 1),
        "staleness_max": max((line["staleness_max"] for line in steps), default=0),
        "success": summary["evaluations"][-1]["success_rate"],
        "interval": summary["evaluations"][-1]["success_ci"],
    }


def picture(found: dict[str, dict[str, Any]]) -> str:
    """Where the time went, as bars of one scale."""
    colors = {"generate": "#2563eb", "environment": "#94a3b8", "train": "#d97706", "sync": "#059669"}
    longest = max(one["seconds"] for one in found.values())
    parts, width, left = [], 720, 110
    for row, (name, one) in enumerate(found.items()):
        x, y = float(left), 34 + 44 * row
        parts.append(svg.text(left - 8, y + 18, name, anchor="end"))
        for part, seconds in one["split"].items():
            wide = (width - left - 70) * seconds / longest
            parts.append(svg.rect(x, y, wide, 26, colors[part], f"{part}: {seconds:.1f} s"))
            x += wide
        parts.append(svg.text(x + 6, y + 18, f"{one['seconds']:.0f} s"))
    for number, (part, color) in enumerate(colors.items()):
        words = {"generate": "wait for replies", "environment": "wait for environments"}.get(part, part)
        x = left + 160 * number
        parts += [svg.rect(x, 8, 12, 12, color), svg.text(x + 18, 18, words)]
    return svg.document(width, 40 + 44 * len(found), parts)


def main() -> None:
    """Train three times: to imitate, in turns, and ahead."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--svg", type=Path, help="Write where the time went as a picture.")
    parser.add_argument("--quick", action="store_true", help="Three steps: does it run at all?")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.groups = 3, 4
    sys.path.insert(0, str(Path(__file__).parent))
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        train(place / "imitated", args, None, 0)
        for staleness in (0, args.staleness):
            name = "in turns" if staleness == 0 else f"staleness {staleness}"
            found[name] = train(place / f"run{staleness}", args, place / "imitated" / "final", staleness)
    turns, ahead = found.values()
    ratio = turns["seconds"] / ahead["seconds"]
    for name, one in found.items():
        low, high = one["interval"]
        print(
            f"{name:12} {one['seconds']:7.1f} s   success {one['success']:.3f} [{low:.3f}, {high:.3f}]   "
            f"staleness {one['staleness']:.2f}, at most {one['staleness_max']:.0f}"
        )
    print(f"faster by {ratio:.2f}")
    if args.svg:
        args.svg.write_text(picture(found), encoding="utf-8")
    print(json.dumps({"benchmark": "async_training", "ratio": ratio, **found}))


if __name__ == "__main__":
    main()
