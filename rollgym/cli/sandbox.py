"""``rollgym sandbox``: what sandboxes need on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rollgym.cli.common import AsJson, console
from rollgym.cli.output import print_json

app = typer.Typer(help="Prepare sandboxes for untrusted code.", no_args_is_help=True, rich_markup_mode=None)
BUILD_EPILOG = "Example: rollgym sandbox build-image --python /usr/bin/python3, then rollgym doctor"


@app.callback()
def _sandbox() -> None:
    """Prepare sandboxes for untrusted code."""


@app.command("build-image", epilog=BUILD_EPILOG)
def build_image(
    tag: Annotated[str, typer.Option(help="The name of the image.")] = "rollgym-sandbox",
    python: Annotated[
        str | None, typer.Option(help="The Python it is made of.", show_default="the one that runs this")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the image for the docker backend from a Python of this machine.

    Nothing is fetched: interpreter, standard library and shared libraries are copied. An image of your own
    does as well, if it has python3 of version 3.10 or later.
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
