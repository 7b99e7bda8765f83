"""``rollgym sandbox`` and ``rollgym doctor``: prepare and test sandboxes on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rollgym.utils.cli_options import AsJson, console
from rollgym.utils.cli_output import print_json

if TYPE_CHECKING:
    from rollgym.sandbox.factory import Finding

app = typer.Typer(
    help="Prepare sandboxes for untrusted code.",
    epilog="Example: rollgym sandbox build-image",
    no_args_is_help=True,
    rich_markup_mode=None,
)
DOCTOR_EPILOG = "Example: rollgym doctor --json | jq '.[] | select(.works).backend'"


@app.callback()
def _sandbox() -> None:
    """Keep `build-image` a subcommand: typer runs the only command of an app without its name."""


@app.command("build-image", epilog="Example: rollgym sandbox build-image --python /usr/bin/python3")
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


def doctor(as_json: AsJson = False) -> None:
    """Test every sandbox backend on this machine.

    Shows for each whether it works, what is missing and how to fix it. Exit code 1 if no backend isolates
    code.
    """
    from rich.markup import escape
    from rich.table import Table

    from rollgym.sandbox.factory import doctor as examine_all
    from rollgym.sandbox.types import Level

    findings = examine_all()
    if as_json:
        rows = [asdict(finding) | {"level": finding.level.name.lower()} for finding in findings]
        print_json(rows)
    else:
        table = Table("backend", "isolation", "works", "notes", box=None, pad_edge=False)
        for finding in findings:
            notes = list(finding.weaknesses)
            if not finding.works:
                notes = [finding.reason, f"Fix: {finding.fix}."]
            elif finding.python:
                notes.insert(0, f"Python inside: {finding.python}.")
            table.add_row(
                f"[bold]{finding.backend}[/]",
                finding.level.name.lower(),
                f"yes, {finding.seconds:.2f} s" if finding.works else "no",
                escape("\n".join(notes)),
            )
        console().print(table)
        console().print(f"\nDefault (backend: auto): {_default(findings)}.", style="dim")
    if not any(finding.works and finding.level > Level.NONE for finding in findings):
        raise typer.Exit(1)


def _default(findings: list[Finding]) -> str:
    from rollgym.sandbox.factory import AUTOMATIC
    from rollgym.sandbox.types import SandboxSettings

    least = SandboxSettings().minimum
    for finding in findings:
        if finding.works and finding.backend in AUTOMATIC and finding.level >= least:
            return finding.backend
    return "code is refused, because no working backend isolates it enough"
