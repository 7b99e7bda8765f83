"""``rollgym train`` and ``rollgym imitate``: train a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollgym.trainer.cli.options import Name, Words, name_and_words
from rollgym.utils.cli_options import (
    AsJson,
    EnvModules,
    console,
    import_modules,
    needs_extra,
    number,
)
from rollgym.utils.cli_output import print_json

EPILOG = "Example: rollgym train sokoban-grpo stop.steps=20 learner.learning_rate=1e-4"
IMITATE_EPILOG = "Example: rollgym imitate sokoban-grpo warm_start.episodes=500 --out runs/imitated"

Out = Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/<time>-<name>")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its last checkpoint.")]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="With --resume: allow the code that the config in --out names.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Print lines instead of a live panel.")]


def train(
    config: Name = None,
    settings: Words = None,
    out: Out = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
    plain: Plain = False,
    as_json: AsJson = False,
    env_module: EnvModules = None,
) -> None:
    """Train a policy with reinforcement learning.

    All settings are in the config; `rollgym config explain` lists them. Ctrl-C saves the last finished step.
    A run can be killed at any moment: --resume continues from the last checkpoint and ends with the same
    weights as an uninterrupted run.
    """
    how = {"resume": resume, "trust_code": trust_code, "plain": plain}
    _run(config, settings, out, as_json, env_module, **how)


def imitate(
    config: Name = None,
    settings: Words = None,
    out: Out = None,
    plain: Plain = False,
    as_json: AsJson = False,
    env_module: EnvModules = None,
) -> None:
    """Train a policy by imitation only (supervised fine-tuning), without reinforcement learning.

    Trains on the demonstrations of the config's warm_start section: episodes of an expert or another agent,
    or recorded ones. The policy is written to final/ in the run folder.
    """
    _run(config, settings, out, as_json, env_module, imitate_only=True, plain=plain)


def _run(
    config: str | None,
    settings: list[str] | None,
    out: Path | None,
    as_json: bool,
    env_module: list[str] | None,
    **how: bool,
) -> None:
    config, words = name_and_words(config, settings)
    with needs_extra("Training", "train"):
        from rollgym.trainer.main import run_training
    summary = run_training(config, words, out, modules=import_modules(env_module), **how)
    if as_json:
        print_json(summary)
    else:
        print_evaluations(summary)


def print_evaluations(summary: dict[str, Any]) -> None:
    """Print the held-out results of a run, where its policy is, and how to repeat the last evaluation."""
    from rich.table import Table

    table = Table("step", "phase", "environment", "held-out success", "interval", "return")
    for line in summary["evaluations"]:
        rate, interval = line["success_rate"], line["success_ci"]
        table.add_row(
            str(line["step"]),
            line["phase"].replace("_", " "),
            line["env"],
            "-" if rate is None else f"{rate:.3f}",
            "" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
            number(line.get("mean_return")),
        )
    screen = console()
    if summary["evaluations"]:
        screen.print(table)
    screen.print(
        f"{summary['steps']} steps in {summary['seconds']:.0f} s ({summary['ended']}); "
        f"policy: {summary['run']}/final"
    )
    commands = summary["eval_commands"]
    if commands:
        screen.print("Repeat the last evaluation with:", highlight=False)
    for command in commands:
        screen.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
