"""``rollgym plan``: place the roles of a training run on devices and explain the choice."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollgym.core.errors import UsageError, os_reason
from rollgym.trainer.cli.options import Name, Words, name_and_words
from rollgym.utils.cli_options import AsJson, EnvModules, console, import_modules, needs_extra
from rollgym.utils.cli_output import print_json

EPILOG = "Example: rollgym plan sokoban-ppo learner.critic=separate --model 7b --tokens 8192 --cluster 8xH100"

ClusterWords = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        help="The cluster: a YAML file, cpu:2, cuda, 8xH100 or 32x8xH100.",
        show_default="this machine",
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Policy size (7b, 200b-moe) or model folder, instead of model.path."),
]
RewardModel = Annotated[
    str | None, typer.Option("--reward-model", help="Also place a reward model: a size or a model folder.")
]
Tokens = Annotated[
    int | None,
    typer.Option("--tokens", help="Longest conversation in tokens, instead of the model's context.", min=1),
]
Staleness = Annotated[
    int | None, typer.Option("--staleness", help="Weight versions that rollouts may lag behind.", min=0)
]
Simulate = Annotated[
    bool,
    typer.Option("--simulate", help="Also run the learner of one rank on fake tensors: its peak memory."),
]
EveryLayer = Annotated[
    bool,
    typer.Option("--every-layer", help="Simulate all layers instead of extrapolating from few (slow)."),
]
Svg = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Also write the plan as an SVG image.")
]


def plan(
    config: Name = None,
    settings: Words = None,
    cluster: ClusterWords = None,
    model: Model = None,
    reward_model: RewardModel = None,
    tokens: Tokens = None,
    staleness: Staleness = None,
    simulate: Simulate = False,
    every_layer: EveryLayer = False,
    svg: Svg = None,
    as_json: AsJson = False,
    env_module: EnvModules = None,
) -> None:
    """Plan which devices a training run uses.

    Starts nothing, and the devices of --cluster need not exist. Constraints are settings:
    devices.layout=split devices.actor_train=gpu[0-3]. Exits with code 2 if the run does not fit, or if
    --simulate refutes the plan.
    """
    config, words = name_and_words(config, settings)
    import_modules(env_module)
    with needs_extra("Planning a training run", "train"):
        from rollgym.trainer.cluster.workload import WhatIf, plan_training
    what_if = WhatIf(model=model, reward_model=reward_model, tokens=tokens, staleness=staleness)
    report = plan_training(config, words, cluster, what_if)
    simulated = None
    if simulate:
        from rollgym.trainer.cluster.simulation import simulate_plan
        from rollgym.trainer.cluster.workload import read_train_config

        with console(stderr=True).status("Simulating one learner rank ..."):
            simulated = simulate_plan(report, read_train_config(config, words), every_layer=every_layer)
    if svg is not None:
        from rollgym.devices.render_svg import render_svg

        try:
            svg.write_text(render_svg(report))
        except OSError as error:
            raise UsageError(f"Cannot write the image to {svg}: {os_reason(error)}.") from error
    if as_json:
        more = {} if simulated is None else {"simulation": simulated.to_json()}
        print_json({**report.to_json(), **more})
    else:
        from rollgym.devices.render_text import render_text

        render_text(console(), report)
        if simulated is not None:
            console().print(f"\n[bold]Simulated learner rank[/]\n{simulated.table()}", highlight=False)
    if simulated is not None:
        simulated.check()
