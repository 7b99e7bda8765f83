"""``rollgym sandbox``: prepare sandboxes on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rollgym.utils.cli_options import AsJson, console
from rollgym.utils.cli_output import print_json

app = typer.Typer(
    help="Prepare sandboxes for untrusted code.",
    epilog="Example: rollgym sandbox build-image",
    no_args_is_help=True,
    rich_markup_mode=None,
)
BUILD_EPILOG = "Example: rollgym sandbox build-image --python /usr/bin/python3"


@app.callback()
def _sandbox() -> None:
    """Keep `build-image` a subcommand: typer runs the only command of an app without its name."""


@app.command("build-image", epilog=BUILD_EPILOG)
def build_image(
    tag: Annotated[str, typer.Option(help="Name of the image.")] = "rollgym-sandbox",
    python: Annotated[
        str | None, typer.Option(help="Python interpreter to copy.", show_default="the running one")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build the image for the docker backend from a Python of this machine.

    Nothing is downloaded: interpreter, standard library and shared libraries are copied. Your own image works
    too if it has python3, version 3.10 or later.
    """
    from rollgym.sandbox.docker_image import build_image as build

    built = build(tag, python)
    if as_json:
        print_json(asdict(built))
    else:
        console().print(
            f"{built.tag}: Python {built.python}, {built.files:,} files, {built.megabytes:.0f} MB",
            highlight=False,
        )
