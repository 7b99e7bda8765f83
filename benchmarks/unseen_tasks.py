"""Success of policies in every environment of a run, on test tasks that the run itself did not play.

    python benchmarks/unseen_tasks.py RUN FOLDER... [--tasks 400] [--dtype bfloat16]

A run that evaluates on the split ``test`` while it trains has looked at its first ``evaluation.episodes``
tasks. This plays the same order of tasks further and counts those after them: each FOLDER is an exported
policy, such as RUN/final or the policy of `rollgym imitate`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rollgym.config.loader import parse
from rollgym.core.types import Limits
from rollgym.evaluation.plan import look_at
from rollgym.evaluation.stats import wilson

DTYPES = ("auto", "float32", "bfloat16")


def successes(env: dict[str, Any], model: Path, skip: int, tasks: int, seed: int, dtype: str) -> list[bool]:
    """Play one environment; returns the result of each task that the run did not play."""
    kwargs = env.get("kwargs", {})
    known = look_at(env["id"], kwargs, Limits()).tasks
    if known is None:
        sys.exit(f"{env['id']} has no task set: nothing tells which tasks a run has played.")
    played = set(itertools.islice(known.order("test", seed), skip))
    episodes = min(skip + tasks, known.size("test"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "eval"
        words = ["eval", env["id"], "--agent", "lm", "--model", str(model), "--split", "test", "--json"]
        words += ["--episodes", str(episodes), "--seed", str(seed), "--out", str(out)]
        words += ["--agent-arg", f"dtype={dtype}"]
        for name, value in kwargs.items():
            words += ["--env-arg", f"{name}={json.dumps(value) if isinstance(value, bool) else value}"]
        done = subprocess.run(
            [sys.executable, "-m", "rollgym", *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        lines = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    return [bool(line["success"]) for line in lines if line["spec"]["task"] not in played]


def main() -> None:
    """Read the arguments, play, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--tasks", type=int, default=400, help="per environment")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    given = parser.parse_args()
    config = parse((given.run / "config.yaml").read_text())
    looked = config["evaluation"]
    report: dict[str, dict[str, Any]] = {}
    for model in given.models:
        rates = []
        for env in config["envs"]:
            found = successes(env, model, looked["episodes"], given.tasks, looked["seed"], given.dtype)
            rate, (low, high) = sum(found) / len(found), wilson(sum(found), len(found))
            rates.append(rate)
            print(f"{model}  {env['id']}  {rate:.3f} [{low:.3f}, {high:.3f}], {len(found)} tasks", flush=True)
            report.setdefault(str(model), {})[env["id"]] = {"rate": rate, "tasks": len(found)}
        report[str(model)]["mean"] = sum(rates) / len(rates)
        print(f"{model}  mean {report[str(model)]['mean']:.3f}", flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
