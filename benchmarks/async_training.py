"""Synchronous against asynchronous training, on environments with a heavy tail.

    python benchmarks/async_training.py [--steps 40] [--staleness 1] [--svg docs/images/async.svg] [--quick]
    python benchmarks/async_training.py --part policies --staleness 2

Part ``speed``: FrozenLake whose steps take as long as a Pareto distribution says: most under a tenth of a
second, some three. Part ``policies``: FrozenLake in which one task in ten is slow, so that its episodes take
longer than the staleness bound allows; once for every policy of `rollout.on_stale`. All runs of a part begin
with the same imitated policy and make the same number of updates of the same size. Wall-clock time covers the
training steps only. Success is on held-out lakes, with Wilson's interval. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollgym.core.env import StepResult
from rollgym.core.tasks import Task
from rollgym.envs.frozen_lake.env import FrozenLakeEnv
from rollgym.io.episode_blocks import stored_episodes
from rollgym.rollout.events import read_events
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


SLOW_EVERY, SLOW, FAST = 10, 0.6, 0.02
"""Part ``policies``: every tenth task is slow; seconds of a step of slow and other tasks."""
WARM_UP = 10
"""Steps before shares are measured: a slow group that starts with the run is trained some steps later."""
POLICIES = {
    "synchronous": [],
    "replay": ["rollout.on_stale=replay"],
    "wait": ["rollout.on_stale=wait"],
    "wait, paced": ["rollout.on_stale=wait", "rollout.pace_slow_groups=true"],
    "mask": ["rollout.on_stale=mask"],
}


class TailLake(FrozenLakeEnv):
    """FrozenLake in which the training tasks 0, 10, 20, ... are slow."""

    pool_thread = "own"

    def begin(self, task: Task) -> str:
        """Start, and note whether the task is slow."""
        self.pause = SLOW if is_slow(task.split, task.index) else FAST
        return super().begin(task)

    def respond(self, action: str) -> StepResult:
        """Move, after a while."""
        time.sleep(self.pause)
        return super().respond(action)


def is_slow(split: str, index: int) -> bool:
    """Whether a task of `TailLake` is slow."""
    return split == "train" and index % SLOW_EVERY == 0


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


def train(
    out: Path,
    args: argparse.Namespace,
    start: Path | None,
    staleness: int,
    env: str = "SlowLake",
    turns: int = 20,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """One run; returns its summary and where the time of its steps went."""
    from rollgym.trainer.main import run_training

    slow = f"envs=[{{id: 'async_training:{env}', limits: {{turns: {turns}, seconds: 600}}}}]"
    imitate = start is None
    fast = [] if imitate else [slow, "imports=[async_training]"]
    summary = run_training(
        "frozen-lake-grpo",
        [*settings(args, start, staleness), *fast, *more],
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


def use_of_tasks(folder: Path, warm_up: int) -> dict[str, float]:
    """What a run of part ``policies`` did with slow tasks and with the turns it played.

    Shares of slow groups: handed out by the sampler, and trained on after ``warm_up`` steps. Turns are those
    of groups that were taken, discarded or masked; what still played at the end is in none of them.
    """
    from rollgym.trainer.config import load_recorded
    from rollgym.trainer.run_tasks import make_task_sampler

    config = load_recorded(folder / "config.yaml")
    sampler = make_task_sampler(config, config.envs, 0)
    events = read_events(folder / "events.jsonl")
    started = {event["group"] for event in events if event["kind"] == "group_started"}
    tasks = [sampler.group_task(int(group[1:])).task or 0 for group in started]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained: dict[str, bool] = {}
    turns = first = 0
    for stored in stored_episodes(folder / "episodes.blocks", tokens=False):
        spec, step = stored.episode.spec, stored.step or 0
        turns += stored.episode.length
        slow = is_slow(spec.split, spec.task or 0)
        first = first or (step if slow else 0)
        if step > warm_up:
            trained[spec.group_id] = slow
    discarded = sum(step.get("turns_discarded", 0) for step in steps)
    masked = sum(step.get("masked_turns", 0) for step in steps)
    return {
        "slow_handed_out": sum(is_slow("train", task) for task in tasks) / len(tasks),
        "slow_trained": sum(trained.values()) / max(len(trained), 1),
        "first_slow_step": first,
        "turns_discarded": discarded / (turns + discarded),
        "turns_masked": masked / (turns + discarded),
        "p90": sum(step["staleness_p90"] for step in steps) / len(steps),
    }


def compare_policies(place: Path, args: argparse.Namespace, start: Path) -> dict[str, dict[str, Any]]:
    """Train once with every policy; prints a table."""
    found: dict[str, dict[str, Any]] = {}
    for number, (name, words) in enumerate(POLICIES.items()):
        folder, staleness = place / f"policy{number}", args.staleness if words else 0
        one = train(folder, args, start, staleness, "TailLake", 12, words)
        found[name] = one | use_of_tasks(folder, 0 if args.quick else WARM_UP)
        low, high = one["interval"]
        one = found[name]
        print(
            f"{name:12} {one['seconds']:6.1f} s, {found['synchronous']['seconds'] / one['seconds']:.2f} x   "
            f"turns discarded {one['turns_discarded']:.1%}, masked {one['turns_masked']:.1%}   "
            f"slow handed out {one['slow_handed_out']:.1%}, trained {one['slow_trained']:.1%}, first at step "
            f"{one['first_slow_step']}   staleness p90 {one['p90']:.2f}, max {one['staleness_max']:.0f}   "
            f"success {one['success']:.3f} [{low:.3f}, {high:.3f}]",
            flush=True,
        )
    return found


def compare_speed(place: Path, args: argparse.Namespace, start: Path) -> dict[str, dict[str, Any]]:
    """Train synchronously and ahead on the Pareto tail."""
    found: dict[str, dict[str, Any]] = {}
    for staleness in (0, args.staleness):
        name = "synchronous" if staleness == 0 else f"staleness {staleness}"
        found[name] = one = train(place / f"run{staleness}", args, start, staleness)
        low, high = one["interval"]
        print(
            f"{name:12} {one['seconds']:7.1f} s   success {one['success']:.3f} [{low:.3f}, {high:.3f}]   "
            f"staleness {one['staleness']:.2f}, at most {one['staleness_max']:.0f}",
            flush=True,
        )
    return found


def main() -> None:
    """Imitate once, then run the chosen parts."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--part", choices=["speed", "policies", "all"], default="all")
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
    result: dict[str, Any] = {"benchmark": "async_training"}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        train(place / "imitated", args, None, 0)
        start = place / "imitated" / "final"
        if args.part != "policies":
            found = compare_speed(place, args, start)
            turns, ahead = found.values()
            result |= found | {"ratio": turns["seconds"] / ahead["seconds"]}
            print(f"faster by {result['ratio']:.2f}")
            if args.svg:
                args.svg.write_text(picture(found), encoding="utf-8")
        if args.part != "speed":
            result["policies"] = compare_policies(place, args, start)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
