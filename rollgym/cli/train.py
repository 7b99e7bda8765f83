"""``rollgym train`` and ``rollgym imitate``: teach a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollgym.cli.common import (
    AsJson,
    EnvModules,
    Name,
    Words,
    console,
    import_modules,
    load_room,
    name_and_words,
    number,
)
from rollgym.cli.output import print_json

EPILOG = "Example: rollgym train sokoban-grpo stop.steps=20 learner.learning_rate=1e-4"
IMITATE_EPILOG = "Example: rollgym imitate sokoban-grpo warm_start.episodes=500 --out runs/imitated"

Out = Annotated[Path | None, typer.Option(help="The run's folder.", show_default="runs/<time>-<name>")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, exactly.")]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="With --resume: run the code that the config in --out names.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of a live panel.")]


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

    Everything is in the configuration: `rollgym config explain` lists the settings. A run can be killed at
    any moment; with --resume it goes on from its last checkpoint, to the same weights as if it had not been.
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
    """Train a policy to imitate, without reinforcement learning.

    Plays the demonstrations that the configuration's warm_start section describes (an expert's, any agent's,
    or recorded ones) and trains on them. The policy is in the run's folder, under final/.
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
    summary = _command().run_training(config, words, out, modules=import_modules(env_module), **how)
    if as_json:
        print_json(summary)
    else:
        _print(summary)


def _command() -> Any:
    return load_room("rollgym.trainer.command", "Training", "train")


def _print(summary: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("step", "when", "environment", "held-out success", "interval", "return")
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
    screen.print(table)
    screen.print(
        f"{summary['steps']} steps in {summary['seconds']:.0f} s ({summary['ended']}); "
        f"the policy is in {summary['run']}/final"
    )
    commands = summary["eval_commands"]
    if commands:
        screen.print("The same evaluation again:", highlight=False)
    for command in commands:
        screen.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
