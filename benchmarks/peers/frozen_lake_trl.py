"""FrozenLake with SmolLM2: CPU time, tokens per second and memory of rollgym and of TRL's `GRPOTrainer`.

    python benchmarks/peers/frozen_lake_trl.py --model FOLDER [--steps 24] [--dtype bfloat16] [--quick]

Both train the same policy (``--model``: a folder with its agent and environment settings, such as
``final/`` of a rollgym run) by GRPO on the same lakes in the same order, with the same prompts, number of
groups, group size, learning rate (constant), AdamW, gradient clipping, threads and dtype: float32, or
``--dtype bfloat16``, which is autocast over float32 weights in TRL and in rollgym's learner. Episodes
are compared as a whole: the advantage is the return minus the group's mean, divided by the standard
deviation with n - 1. One on-policy update per step; every sampled token has the same weight.

Contenders (``--contenders``; the first two are the default):

    rollgym                `rollgym train`, history none: each turn is a separate conversation
    trl                    the same through TRL's ``rollout_func``, one row per turn
    rollgym-conversation   history full: all turns of an episode in one conversation
    trl-conversation       the same, one row per episode
    rollgym-config         ``--config`` with its own estimator, loss and learning rate

`trl_frozen_lake.py` describes what TRL's interfaces can express. In short: the number of rows per step
is fixed, so ``trl`` reserves ``--turn-slots`` rows per episode, fills unused ones and drops turns beyond them
(``filled_rows``, ``dropped_rows``); rows are padded to the longest; there is no prefix sharing. TRL's
``rollout_cpu_seconds`` are what sampling and environments take of its CPU time.

Measured from outside, by the same code: user and system time of the process tree from the moment the model is
loaded (``startup_cpu_minutes`` is what came before) to the end of each step, and the largest resident set
until the last step ends. Both write a full checkpoint every ``--every`` steps, which counts. Evaluation does
not: after training, `rollgym eval` plays ``--episodes`` held-out lakes (split dev) with each checkpoint.
``generated_tokens`` are sampled tokens; ``total_tokens`` also count the prompt of every turn, computed or
cached.

The same success is ``--target``, by default the highest that both contenders of a pair reach; the time is
that of the first checkpoint with it. An equal budget is the CPU time of the faster contender's whole run. All
ratios are above 1 where rollgym is better.

TRL has its own virtual environment (see `benchmarks/train_step.py`), where this installs the dependencies of
rollgym's core; rollgym itself comes from this repository by PYTHONPATH. Without TRL it is measured alone.
A finished contender in ``--out`` is not repeated. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import rollgym
from rollgym.core import types
from rollgym.core.seeding import derive_seed
from rollgym.io.episode_blocks import stored_episodes
from rollgym.models.policy_settings import ModelSettings, read_model_settings
from rollgym.rollout.task_sampler import EnvSource, TaskSampler

ROOT = Path(__file__).resolve().parents[2]
PEER = Path(__file__).resolve().parent / "trl_frozen_lake.py"
sys.path.insert(0, str(ROOT / "benchmarks"))

from peers.process_usage import Usage, count_lines, run_contender  # noqa: E402
from train_step import PEER_VENV, TRL, peer_python  # noqa: E402

ENV, SPLIT = "rollgym/FrozenLake-v0", "train"
BETAS = (0.9, 0.99)
ENGINE_BATCH = 64
"""Replies sampled at once, on both sides."""
CONTENDERS = ("rollgym", "trl", "rollgym-conversation", "trl-conversation", "rollgym-config")
PAIRS = {"": ("rollgym", "trl"), "_conversation": ("rollgym-conversation", "trl-conversation")}
"""By suffix of the keys."""
QUICK = {"steps": 2, "groups": 2, "group_size": 4, "every": 1, "episodes": 8, "turn_slots": 6}


@dataclass
class Measured:
    """What was measured of one contender."""

    name: str
    settings: dict[str, Any]
    """The options it ran with: a finished contender is repeated if they differ."""
    usage: list[Usage]
    peak_mb: float
    counts: dict[str, float]
    """Tokens, turns, episodes and rows of all steps, as the contender counted them."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def cpu_minutes(self, step: int | None = None) -> float:
        """CPU time from the loaded model to the end of a step, by default the last one."""
        found = self.usage[-1] if step is None else next(mark for mark in self.usage if mark.step == step)
        return (found.cpu_seconds - self.usage[0].cpu_seconds) / 60

    def rate(self, count: str, clock: str = "wall_seconds") -> float:
        """Tokens per second of wall time or of CPU time."""
        return self.counts[count] / float(getattr(self.usage[-1], clock) - getattr(self.usage[0], clock))

    def best(self) -> float:
        """The highest success of a checkpoint."""
        return max(float(line["success"]) for line in self.evaluations)

    def cpu_minutes_to(self, target: float) -> float | None:
        """CPU time of the first checkpoint with this success."""
        reached = (line["step"] for line in self.evaluations if line["success"] >= target)
        step = next(reached, None)
        return None if step is None else self.cpu_minutes(step)

    def success_within(self, minutes: float) -> float:
        """Success of the last checkpoint within a CPU budget."""
        lines = [line for line in self.evaluations if self.cpu_minutes(line["step"]) <= minutes + 1e-9]
        return float(lines[-1]["success"])

    def figures(self) -> dict[str, Any]:
        """The figures for the report."""
        return {
            "steps": self.usage[-1].step,
            "cpu_minutes": round(self.cpu_minutes(), 2),
            "startup_cpu_minutes": round(self.usage[0].cpu_seconds / 60, 2),
            "wall_minutes": round((self.usage[-1].wall_seconds - self.usage[0].wall_seconds) / 60, 2),
            "generated_tokens_per_second": round(self.rate("generated_tokens"), 2),
            "total_tokens_per_second": round(self.rate("total_tokens"), 1),
            "generated_tokens_per_cpu_second": round(self.rate("generated_tokens", "cpu_seconds"), 2),
            "peak_mb": round(self.peak_mb),
            "counts": self.counts,
            "success": {line["step"]: line["success"] for line in self.evaluations},
        }


def model_settings(model: Path) -> ModelSettings:
    """The agent and environment settings that are saved with the model."""
    saved = read_model_settings(model)
    if saved is None or [env.id for env in saved.envs] != [ENV]:
        raise SystemExit(f"{model} has no settings for {ENV}: pass final/ of a rollgym run on it.")
    return saved


def agent_options(name: str, model: Path) -> dict[str, Any]:
    """The agent settings of a contender: those of the model, with the contender's history."""
    return {**model_settings(model).options, "history": history_of(name)}


def history_of(name: str) -> str:
    """Earlier turns that the policy of a contender sees."""
    return "full" if name.endswith("conversation") else "none"


def env_kwargs(model: Path) -> dict[str, Any]:
    """The arguments of the environment that the model was trained in."""
    return model_settings(model).envs[0].kwargs


def rollgym_config(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The config of the matched rollgym contenders."""
    return {
        "envs": [{"id": ENV, "kwargs": env_kwargs(args.model), "split": SPLIT}],
        "agent": agent_options(name, args.model),
        "estimator": "grpo",
        "advantage": {"std_correction": 1},
        "loss": {"name": "grpo"},
        "learner": {
            "learning_rate": args.learning_rate,
            "schedule": "constant",
            "betas": list(BETAS),
            "max_tokens_per_microbatch": args.max_tokens_per_microbatch,
            "old_logprobs": "rollout",
        },
    }


def train_rollgym(name: str, folder: Path, args: argparse.Namespace) -> tuple[list[Usage], float]:
    """Run `rollgym train` in ``folder``/run."""
    if name == "rollgym-config":
        config = args.config
    else:
        path = folder / "config.yaml"
        path.write_text(json.dumps(rollgym_config(name, args), indent=2))  # JSON is YAML
        config = str(path)
    settings = {
        "model.path": args.model,
        "warm_start": "null",
        "seed": args.seed,
        "rollout.groups": args.groups,
        "rollout.group_size": args.group_size,
        "rollout.max_in_flight": args.groups * args.group_size,
        "engine.max_batch": ENGINE_BATCH,
        "engine.threads": args.threads,
        "engine.dtype": args.dtype,
        "learner.dtype": args.dtype,
        "learner.threads": args.threads,
        "evaluation.every": 0,
        "evaluation.episodes": 1,
        "checkpoints.every": args.every,
        "checkpoints.keep": args.steps + 1,
        "tracking.tensorboard": "false",
        "tracking.tokens_every": 0,
        "stop.steps": args.steps,
    }
    run = folder / "run"
    overrides = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "rollgym", "train", config, "--plain", "--out", str(run), *overrides]
    loaded = run / "checkpoints" / f"step-{0:08d}"
    return run_contender(
        command,
        {"OMP_NUM_THREADS": str(args.threads)},
        folder / "output.txt",
        folder / "log.txt",
        args.steps,
        lambda: count_lines(run / "metrics.jsonl") if loaded.exists() else -1,
    )


def rollgym_counts(folder: Path) -> dict[str, float]:
    """Tokens, turns and episodes of the training steps."""
    counts = {"episodes": 0.0, "turns": 0.0, "generated_tokens": 0.0, "total_tokens": 0.0}
    for stored in stored_episodes(folder / "run" / "episodes.blocks", tokens=False):
        counts["episodes"] += 1
        for turn in stored.episode.turns:
            usage = turn.usage or types.Usage()
            counts["turns"] += 1
            counts["generated_tokens"] += usage.completion_tokens
            counts["total_tokens"] += usage.prompt_tokens + usage.completion_tokens
    return counts


def train_trl(
    name: str, folder: Path, python: Path, args: argparse.Namespace
) -> tuple[list[Usage], float, dict[str, float]]:
    """Run the peer in ``folder``/run; also returns its token counts."""
    environment = rollgym.make(ENV, **env_kwargs(args.model))
    source = EnvSource(env_id=ENV, tasks=environment.get_wrapper_attr("tasks"), split=SPLIT)
    sampler = TaskSampler([source], seed=derive_seed("tasks", args.seed, 0))  # the order of `rollgym train`
    groups = [sampler.group_task(number) for number in range(args.steps * args.groups)]
    job = {
        "model": str(args.model),
        "out": str(folder / "run"),
        "env": ENV,
        "env_kwargs": env_kwargs(args.model),
        "agent": agent_options(name, args.model),
        "layout": "turns" if history_of(name) == "none" else "conversation",
        "tasks": [
            {"env_seed": task.env_seed, "options": {"task": task.task, "split": SPLIT}} for task in groups
        ],
        "batch": args.trl_batch,
        "generate_batch": ENGINE_BATCH,
        "betas": BETAS,
        **{
            key: getattr(args, key)
            for key in ("groups", "group_size", "steps", "every", "turn_slots", "threads", "seed", "dtype")
        },
        "learning_rate": args.learning_rate,
    }
    (folder / "job.json").write_text(json.dumps(job))
    output = folder / "output.txt"
    usage, peak = run_contender(
        [str(python), str(PEER), str(folder / "job.json")],
        {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        output,
        folder / "log.txt",
        args.steps,
        lambda: count_lines(output) - 1,
    )
    steps = [json.loads(line) for line in output.read_text().splitlines()[1:]]
    names = (
        *("turns", "generated_tokens", "prompt_tokens", "filled_rows", "dropped_rows"),
        "rollout_cpu_seconds",
    )
    counts = {name: float(sum(step.get(name, 0) for step in steps)) for name in names}
    prompts = counts.pop("prompt_tokens")
    counts["episodes"] = float(args.steps * args.groups * args.group_size)
    counts["total_tokens"] = prompts + counts["generated_tokens"]
    return usage, peak, counts


def export_weights(weights: Path, model: Path, target: Path) -> None:
    """Make a model folder from the weights of a checkpoint and the other files of the initial model."""
    from safetensors.torch import load_file, save_file

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(model, target)
    names = set(load_file(model / "model.safetensors"))
    tensors = {
        name if name in names else name.removeprefix("model."): tensor
        for name, tensor in load_file(weights).items()
    }
    if set(tensors) != names:
        raise SystemExit(f"{weights} has other parameters than {model}: {sorted(set(tensors) ^ names)[:4]}.")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def evaluate(model: Path, history: str, args: argparse.Namespace) -> dict[str, Any]:
    """Play held-out lakes with a policy by `rollgym eval`."""
    options = {"--agent": "lm", "--model": str(model), "--split": "dev", "--episodes": str(args.episodes)}
    command = [sys.executable, "-m", "rollgym", "eval", ENV, "--json", "--out", str(args.out / "eval")]
    command += [text for option in options.items() for text in option]
    command += [f"--env-arg={key}={json.dumps(value)}" for key, value in env_kwargs(args.model).items()]
    settings = (f"history={history}", f"threads={args.threads}", f"dtype={args.dtype}")
    command += [f"--agent-arg={setting}" for setting in settings]
    shutil.rmtree(args.out / "eval", ignore_errors=True)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"The evaluation of {model} failed:\n{done.stderr[-2000:]}")
    summary = json.loads(done.stdout)
    return {"success": summary["success_rate"], "success_ci": summary["success_ci"]}


def measure(name: str, python: Path | None, args: argparse.Namespace) -> Measured:
    """Train a contender and evaluate its checkpoints."""
    folder = args.out / name
    settings = {key: str(getattr(args, key)) for key in SETTINGS}
    done = folder / "measured.json"
    if done.exists():
        saved = json.loads(done.read_text())
        if saved["settings"] == settings:
            print(f"{name}: measured before, in {folder}", flush=True)
            return Measured(**{**saved, "usage": [Usage(**mark) for mark in saved["usage"]]})
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{name}: training in {folder}", flush=True)
    if name.startswith("trl"):
        assert python is not None
        usage, peak, counts = train_trl(name, folder, python, args)
    else:
        usage, peak = train_rollgym(name, folder, args)
        counts = rollgym_counts(folder)
    measured = Measured(name, settings, usage, peak, counts)
    for step in evaluated_steps(args):
        policy = args.model
        if step:
            weights = {
                "trl": folder / "run" / f"checkpoint-{step}" / "model.safetensors",
                "rollgym": folder / "run" / "checkpoints" / f"step-{step:08d}" / "learner.safetensors",
            }
            policy = folder / "policy"
            export_weights(weights[name.partition("-")[0]], args.model, policy)
        line = {
            "step": step,
            "cpu_minutes": measured.cpu_minutes(step),
            **evaluate(policy, history_of(name), args),
        }
        measured.evaluations.append(line)
        print(
            f"  success {line['success']:.2f} at step {step}, {line['cpu_minutes']:.2f} CPU-minutes",
            flush=True,
        )
    done.write_text(json.dumps(asdict(measured)))
    if not args.keep:
        shutil.rmtree(folder / "run", ignore_errors=True)
    return measured


def evaluated_steps(args: argparse.Namespace) -> list[int]:
    """The initial policy, the checkpoints, and the last step."""
    return sorted({*range(0, args.steps + 1, args.every), args.steps})


def compare(ours: Measured, theirs: Measured, suffix: str, args: argparse.Namespace) -> dict[str, Any]:
    """The ratios of a pair, above 1 where rollgym is better."""
    target = args.target or min(ours.best(), theirs.best())
    minutes = [one.cpu_minutes_to(target) for one in (ours, theirs)]
    budget = min(ours.cpu_minutes(), theirs.cpu_minutes())
    # A target that the initial policy has takes no training, so there is no ratio.
    ratio = minutes[1] / minutes[0] if minutes[0] and minutes[1] else None
    report = {
        "target_success": target,
        "rollgym_cpu_minutes_to_target": minutes[0],
        "trl_cpu_minutes_to_target": minutes[1],
        "cpu_minutes_ratio_to_same_success": ratio,
        "cpu_minutes_ratio": theirs.cpu_minutes() / ours.cpu_minutes(),
        "budget_cpu_minutes": budget,
        "rollgym_success_at_budget": ours.success_within(budget),
        "trl_success_at_budget": theirs.success_within(budget),
        "tokens_per_second_ratio": ours.rate("generated_tokens") / theirs.rate("generated_tokens"),
        "total_tokens_per_second_ratio": ours.rate("total_tokens") / theirs.rate("total_tokens"),
        "tokens_per_cpu_second_ratio": ours.rate("generated_tokens", "cpu_seconds")
        / theirs.rate("generated_tokens", "cpu_seconds"),
        "peak_memory_ratio": theirs.peak_mb / ours.peak_mb,
    }
    return {f"{key}{suffix}": round(value, 3) if value is not None else None for key, value in report.items()}


def install_core(python: Path) -> bool:
    """Install the dependencies of rollgym's core in TRL's environment; False if that fails."""
    names = [re.match(r"[\w.-]+", line) for line in requires("rollgym") or () if "extra ==" not in line]
    wanted = [f"{name[0]}=={version(name[0])}" for name in names if name]
    done = subprocess.run([python, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True)
    if done.returncode:
        print(f"Cannot install rollgym's dependencies for TRL: {done.stderr.strip()[-500:]}")
    return done.returncode == 0


SETTINGS = {
    "model": (Path, None, "folder of the initial policy, with its agent settings (required)"),
    "steps": (int, 24, "training steps"),
    "groups": (int, 8, "groups per step"),
    "group_size": (int, 8, "episodes per group"),
    "learning_rate": (float, 3e-5, "constant"),
    "every": (int, 4, "steps between checkpoints to evaluate"),
    "episodes": (int, 100, "held-out episodes per evaluation"),
    "threads": (int, 1, "threads of each contender"),
    "dtype": (str, "float32", "float32 or bfloat16, of both"),
    "seed": (int, 0, "seed of the tasks and of sampling"),
    "turn_slots": (int, 8, "rows per episode of the contender trl"),
    "trl_batch": (int, 8, "TRL's rows in memory at once"),
    "max_tokens_per_microbatch": (int, 1024, "rollgym's tokens in memory at once"),
    "config": (str, "", "config of the contender rollgym-config"),
}
"""Type, default and help of the options that determine a result."""


def read_arguments() -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, (kind, default, text) in SETTINGS.items():
        shown = f"{text} (default {default}{f', quick {QUICK[name]}' if name in QUICK else ''})"
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, help=text if default in (None, "") else shown
        )
    parser.add_argument(
        "--target", type=float, help="success to reach (default: the highest that both reach)"
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS[:2])
    parser.add_argument(
        "--out", type=Path, help="results (default runs/frozen-lake-trl, quick: -quick added)"
    )
    parser.add_argument("--keep", action="store_true", help="keep checkpoints (1.6 GB each)")
    parser.add_argument("--quick", action="store_true", help="2 steps of 2 groups of 4, to try it")
    parser.add_argument("--peer-venv", type=Path, default=PEER_VENV, help="TRL's environment")
    args = parser.parse_args()
    for name, (_, default, _) in SETTINGS.items():
        if getattr(args, name) is None:
            setattr(args, name, QUICK.get(name, default) if args.quick else default)
    if args.model is None or not (args.model / "model.safetensors").is_file():
        parser.error("--model: pass a folder with model.safetensors, such as final/ of a rollgym run")
    if "rollgym-config" in args.contenders and not args.config:
        parser.error("rollgym-config needs --config")
    if args.groups * args.group_size % args.trl_batch:
        parser.error("groups x group-size must be a multiple of --trl-batch")
    if args.dtype not in ("float32", "bfloat16"):
        parser.error(f"--dtype must be float32 or bfloat16, not {args.dtype}")
    args.model = args.model.resolve()
    args.out = (args.out or Path("runs", f"frozen-lake-trl{'-quick' * args.quick}")).resolve()
    return args


def main() -> None:
    """Measure the contenders and print a table and one JSON line."""
    args = read_arguments()
    python = None
    if any(name.startswith("trl") for name in args.contenders):
        python = peer_python(args.peer_venv)
        if python is None or not install_core(python):
            python = None
            print("TRL is not installed and cannot be installed without network: rollgym is measured alone.")
    names = [name for name in args.contenders if python or not name.startswith("trl")]
    found = {name: measure(name, python, args) for name in names}
    print(f"\n{'':22}{'CPU-min':>9}{'tok/s':>9}{'total/s':>10}{'peak MB':>9}{'success':>9}{'best':>7}")
    for name, one in found.items():
        rates = f"{one.rate('generated_tokens'):9.2f}{one.rate('total_tokens'):10.1f}{one.peak_mb:9,.0f}"
        print(
            f"{name:22}{one.cpu_minutes():9.2f}{rates}{one.evaluations[-1]['success']:9.2f}{one.best():7.2f}"
        )
    report: dict[str, Any] = {name.replace("-", "_"): one.figures() for name, one in found.items()}
    for suffix, (ours, theirs) in PAIRS.items():
        if ours in found and theirs in found:
            report |= compare(found[ours], found[theirs], suffix, args)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    settings = {key: settings[key] for key in (*SETTINGS, "target", "quick")}
    print(json.dumps({"benchmark": "frozen_lake_trl", **settings, "peer": TRL if python else None, **report}))


if __name__ == "__main__":
    main()
