"""A larger policy teaches a smaller one: offline and on-policy distillation against RL, at equal CPU time.

    python benchmarks/distillation.py prepare FOLDER
    python benchmarks/distillation.py student FOLDER NAME --objective offline --seed 0 epochs=20 ...
    python benchmarks/distillation.py test FOLDER NAME...

``prepare`` makes the teacher (a small policy that imitates the expert) and the start (a tiny policy that has
imitated it for a moment). ``student`` trains the start by one of ``offline``, ``on_policy`` and ``rl``, in a
subprocess whose whole CPU time is measured, and prints the success on the dev split. ``test`` plays the test
split, which is for the end.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

ENV = "rollgym/FrozenLake-v0"
SHORT = [
    "evaluation.every=0",
    "evaluation.episodes=100",
    "checkpoints.every=100000",
    "tracking.tensorboard=false",
]


def rollgym(*words: str) -> tuple[Any, float]:
    """Run a command of rollgym; returns its JSON and the CPU seconds of all its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "rollgym", *words, "--json"], capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stderr[-2000:]}")
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return json.loads(done.stdout), seconds


def prepare(folder: Path) -> None:
    """Make the teacher and the start."""
    for name, words in {
        "teacher": ["model.size=small", "warm_start.until_success=null", "warm_start.epochs=12"],
        "start": ["warm_start.until_success=0.4", "warm_start.check_every=4", "warm_start.episodes=100"],
    }.items():
        result, seconds = rollgym("imitate", "frozen-lake-grpo", "--out", str(folder / name), *SHORT, *words)
        print(name, f"{seconds:.0f} s of CPU time, success {result['last_success']}", flush=True)


def student(folder: Path, name: str, objective: str, seed: int, words: list[str]) -> None:
    """Train the start and print the success on the dev split."""
    start, teacher = folder / "start" / "final", folder / "teacher" / "final"
    common = ["--out", str(folder / name), f"model.path={start}", f"seed={seed}", *SHORT]
    match objective:
        case "offline":
            settings = [
                f"envs=[{{id: {ENV}}}]",
                "agent.instructions=false",
                "agent.history=none",
                "agent.max_tokens=4",
                "learner.threads=1",
                "data.agent=lm",
                f"data.agent_options={{model: {teacher}}}",
                f"distill={{teachers: [{{path: {teacher}}}], top_k: 16}}",
            ]
            result, seconds = rollgym("sft", *common, *settings, *words)
        case "on_policy":
            distill = f"distill={{teachers: [{{path: {teacher}}}], reward_weight: 0}}"
            result, seconds = rollgym(
                "train",
                "frozen-lake-grpo",
                *common,
                "warm_start=null",
                "loss.entropy_coef=0",
                distill,
                *words,
            )
        case _:
            result, seconds = rollgym("train", "frozen-lake-grpo", *common, "warm_start=null", *words)
    print(
        name,
        f"{seconds:.0f} s of CPU time, {result['steps']} steps",
        "dev",
        result["last_success"],
        flush=True,
    )


def test(folder: Path, names: list[str]) -> None:
    """Play 300 tasks of the test split with each policy."""
    for name in names:
        policy, out = folder / name / "final", folder / f"{name}-test"
        agent = ["--agent", "lm", "--agent-arg", f"model={policy}"]
        result, _ = rollgym("eval", ENV, *agent, "--split", "test", "--episodes", "300", "--out", str(out))
        summary = result.get("summary", result)
        low, high = summary["success_ci"]
        print(f"{name}: {summary['success_rate']:.2f} [{low:.2f}, {high:.2f}]", flush=True)


def main() -> None:
    """Read the arguments and run one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["prepare", "student", "test"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--objective", choices=["offline", "on_policy", "rl"], default="offline")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_intermixed_args()
    if given.part == "prepare":
        prepare(given.folder)
    elif given.part == "student":
        name, *words = given.words
        student(given.folder, name, given.objective, given.seed, words)
    else:
        test(given.folder, given.words)


if __name__ == "__main__":
    main()
