"""What each part of a recipe adds, one at a time, to whole-episode GRPO on the environment's own reward.

    python benchmarks/ablations.py --env frozen-lake --out runs/ablations
    python benchmarks/ablations.py --env sokoban --seeds 0 1 --variants own-reward solver --out runs/ablations

Trains the built-in policy once per variant and seed, each run to its end, one after the other. During
training, policies are evaluated on `dev`; the final one is evaluated once on 300 tasks of `test`, at
temperature 1 as in training. Finished cells in --out are not run again, and an interrupted one is resumed,
so the command can be stopped at any time. It prints a Markdown table, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollgym.evaluation.stats import wilson
from rollgym.io.run_dir import SUMMARY, read_json

TEST_EPISODES = 300


@dataclass(frozen=True)
class Variant:
    """A row of the table: settings that differ from the base."""

    name: str
    title: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """A shipped config, the settings that make it the base, and the variants."""

    config: str
    env_id: str
    base: tuple[str, ...]
    variants: tuple[Variant, ...]


STATE_VALUES = (
    "estimator=gae_states",
    "advantage.gamma=0.95",
    "advantage.lam=0.7",
    "advantage.whiten=batch",
)
STUDIES = {
    "frozen-lake": Study(
        config="frozen-lake-grpo",
        env_id="rollgym/FrozenLake-v0",
        base=("evaluation.split=dev",),
        variants=(
            Variant("own-reward", "whole-episode GRPO, the environment's own reward"),
            Variant("gigpo", "+ step-level advantages (GiGPO)", ("estimator=gigpo", "advantage.gamma=0.95")),
            Variant("states", "+ values of states (`gae_states`)", STATE_VALUES),
            Variant("view", "+ view in words (`view: local`)", ("envs.0.kwargs.view=local",)),
            Variant("clip", "+ a wider upper clip bound (0.28)", ("loss.clip_high=0.28",)),
            Variant("entropy", "+ three times the entropy bonus", ("loss.entropy_coef=0.01",)),
        ),
    ),
    "sokoban": Study(
        config="sokoban-reinforce",
        env_id="rollgym/Sokoban-v0",
        base=(
            "evaluation.split=dev",
            "envs.0.kwargs.progress_reward=0",
            "envs.0.kwargs.bump_penalty=0",
            "envs.0.kwargs.invalid_penalty=0",
            "reward_shaping.clip=null",
            "reward_shaping.scale=0.1",
            "rollout.groups=32",
            "rollout.group_size=8",
            "estimator=grpo",
            "advantage.gamma=1",
        ),
        variants=(
            Variant("own-reward", "whole-episode GRPO, the environment's own reward"),
            Variant("solver", "+ a solver's reward for each move", ("envs.0.kwargs.progress_reward=2",)),
            Variant("clip", "+ rewards clipped to -4 to 4", ("reward_shaping.clip=[-4, 4]",)),
            Variant(
                "bump",
                "+ a price for bumps and invalid actions",
                ("envs.0.kwargs.bump_penalty=2", "envs.0.kwargs.invalid_penalty=4"),
            ),
            Variant("view", "+ all eight cells around (`view: around`)", ("envs.0.kwargs.view=around",)),
            Variant("gigpo", "+ step-level advantages (GiGPO)", ("estimator=gigpo", "advantage.gamma=0.8")),
            Variant("states", "+ values of states (`gae_states`)", STATE_VALUES),
        ),
    ),
}


def run(*arguments: str) -> None:
    """Run a command of rollgym, and end with its error if it fails."""
    command = [str(Path(sys.executable).with_name("rollgym")), *arguments]
    finished = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if finished.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{finished.stderr[-2000:]}")


def cell(study: Study, variant: Variant, seed: int, out: Path) -> dict[str, Any]:
    """Train and test one variant with one seed, or read the finished result."""
    result = out / "result.json"
    if result.exists():
        loaded: dict[str, Any] = json.loads(result.read_text())
        return loaded
    began, spent = time.monotonic(), _child_seconds()
    settings = (*study.base, *variant.settings, f"seed={seed}")
    resume = ("--resume",) if (out / "run" / "checkpoints").exists() else ()
    run("train", study.config, *settings, "--out", str(out / "run"), "--plain", *resume)
    kwargs = _env_kwargs(out / "run")
    run(
        "eval", study.env_id, "--agent", "lm", "--model", str(out / "run" / "final"), "--split", "test",
        "--episodes", str(TEST_EPISODES), "--seed", "1", "--out", str(out / "test"),
        *(word for key, value in kwargs.items() for word in ("--env-arg", f"{key}={json.dumps(value)}")),
    )  # fmt: skip
    summary, test = read_json(out / "run" / SUMMARY), read_json(out / "test" / SUMMARY)
    dev = [line["success_rate"] for line in summary["evaluations"] if line["phase"] != "before"]
    found = {
        "variant": variant.name,
        "seed": seed,
        "dev": dev,
        "test": test["success_rate"],
        "test_successes": round(test["success_rate"] * TEST_EPISODES),
        "resumed": bool(resume),
        "cpu_minutes": round((_child_seconds() - spent) / 60, 2),
        "minutes": round((time.monotonic() - began) / 60, 2),
    }
    result.write_text(json.dumps(found))
    return found


def _env_kwargs(folder: Path) -> dict[str, Any]:
    from rollgym.config.loader import parse

    kwargs: dict[str, Any] = parse((folder / "config.yaml").read_text())["envs"][0].get("kwargs") or {}
    return kwargs


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(study: Study, cells: list[dict[str, Any]]) -> str:
    """One row per variant: each seed, and all seeds together."""
    lines = [
        "| variant | seed | after the warm start (dev) | best on dev | test | CPU time |",
        "|---|---|---|---|---|---|",
    ]
    for variant in study.variants:
        own = [found for found in cells if found["variant"] == variant.name]
        for number, found in enumerate(own):
            low, high = wilson(found["test_successes"], TEST_EPISODES)
            lines.append(
                f"| {variant.title if number == 0 else ''} | {found['seed']} | {found['dev'][0]:.2f} "
                f"| {max(found['dev']):.2f} | {found['test']:.2f} [{low:.2f}, {high:.2f}] "
                f"| {found['cpu_minutes']:.1f} min |"
            )
        if len(own) > 1:
            mean = sum(found["test"] for found in own) / len(own)
            lines.append(f"| | all | | | {mean:.2f} | |")
    return "\n".join(lines)


def main() -> None:
    """Run the cells that are missing and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", choices=sorted(STUDIES), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", help="Only these; default: all.")
    parser.add_argument("--out", type=Path, required=True, help="Folder for runs and results.")
    args = parser.parse_args()
    study = STUDIES[args.env]
    names = [variant.name for variant in study.variants]
    if unknown := sorted(set(args.variants or ()) - set(names)):
        parser.error(f"--variants: {', '.join(unknown)} unknown; choose from {', '.join(names)}")
    cells = []
    for variant in study.variants:
        for seed in args.seeds:
            folder = args.out / args.env / f"{variant.name}-{seed}"
            if args.variants and variant.name not in args.variants and not (folder / "result.json").exists():
                continue
            folder.mkdir(parents=True, exist_ok=True)
            cells.append(cell(study, variant, seed, folder))
            print(f"{variant.name}, seed {seed}: test {cells[-1]['test']:.3f}", file=sys.stderr, flush=True)
    print(table(study, cells))
    print(json.dumps({"env": args.env, "cells": cells}))


if __name__ == "__main__":
    main()
