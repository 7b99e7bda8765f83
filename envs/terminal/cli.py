"""``rollgym export harbor``: write tasks as task folders of Harbor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollgym.utils.cli_options import AsJson, EnvArgs, EnvName, parse_pairs
from rollgym.utils.cli_output import print_json

HARBOR_EPILOG = "Example: rollgym export harbor rollgym/Terminal-v0 --out tasks --split test --count 20"


def harbor(
    env: EnvName,
    out: Annotated[Path, typer.Option(help="New or empty folder to write to.", show_default=False)],
    split: Annotated[str, typer.Option(help="Split of the environment's task set.")] = "test",
    count: Annotated[int, typer.Option(help="Number of tasks.")] = 10,
    start: Annotated[int, typer.Option(help="Index of the first task.")] = 0,
    image: Annotated[
        str, typer.Option(help="Base image of the Dockerfiles, with bash, Python and git.")
    ] = "python:3.12",
    env_arg: EnvArgs = None,
    as_json: AsJson = False,
) -> None:
    """Write tasks of Terminal or Code as task folders of Harbor.

    Terminal tasks can be read back: --env-arg folder=DIR.
    """
    from rollgym.envs.terminal.export import export_tasks

    folders = export_tasks(
        env,
        out,
        split=split,
        count=count,
        start=start,
        env_kwargs=parse_pairs(env_arg, "--env-arg"),
        image=image,
    )
    if as_json:
        print_json({"folders": [str(folder) for folder in folders]})
    else:
        print(f"{len(folders)} task folders in {out}")
