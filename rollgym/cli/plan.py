"""``rollgym plan``: which role of a training run would work on which devices, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
)
from rollgym.cli.output import print_json
from rollgym.errors import UsageError, os_reason

EPILOG = "Example: rollgym plan sokoban-ppo learner.critic=own --model 7b --tokens 8192 --cluster 8xH100"

ClusterWords = Annotated[
    str | None,
    typer.Option("--cluster", metavar="FILE", help="A YAML file, cpu:2, cuda, 8xH100 or 32x8xH100."),
]
Model = Annotated[str | None, typer.Option("--model", help="Plan for this policy: 7b, 200b-moe, a folder.")]
RewardModel = Annotated[str | None, typer.Option("--reward-model", help="Plan for a reward model too.")]
Tokens = Annotated[int | None, typer.Option("--tokens", help="The longest conversation.", min=1)]
Staleness = Annotated[
    int | None, typer.Option("--staleness", help="Versions that rollouts may lag behind.", min=0)
]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the plan into this file.")]


def plan(
    config: Name = None,
    settings: Words = None,
    cluster: ClusterWords = None,
    model: Model = None,
    reward_model: RewardModel = None,
    tokens: Tokens = None,
    staleness: Staleness = None,
    svg: Svg = None,
    as_json: AsJson = False,
    env_module: EnvModules = None,
) -> None:
    """Plan a training run on devices.

    Without --cluster, on this machine. Nothing is started, and described devices need not exist. Wishes are
    settings: devices.layout=split devices.actor_train=gpu[0-3]. Exit code 2 where nothing fits.
    """
    config, words = name_and_words(config, settings)
    import_modules(env_module)
    room = load_room("rollgym.trainer.planning", "Planning a training run", "train")
    what_if = room.WhatIf(model=model, reward_model=reward_model, tokens=tokens, staleness=staleness)
    found = room.plan_training(config, words, cluster, what_if)
    if svg is not None:
        from rollgym.devices.svg import picture

        try:
            svg.write_text(picture(found))
        except OSError as error:
            raise UsageError(f"Cannot write the picture to {svg}: {os_reason(error)}.") from error
    if as_json:
        print_json(found.to_json())
    else:
        from rollgym.devices.draw import show

        show(console(), found)
