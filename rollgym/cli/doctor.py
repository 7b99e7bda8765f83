"""``rollgym doctor``: which walls for untrusted code work on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from rollgym.cli.common import AsJson, console
from rollgym.cli.output import print_json

if TYPE_CHECKING:
    from rollgym.sandbox.doctor import Finding

EPILOG = "Example: rollgym doctor --json | jq '.[] | select(.works).backend'"


def doctor(as_json: AsJson = False) -> None:
    """Try every sandbox for real.

    For each: whether it works here, what is missing and how to get it. Exit code 1 where none has walls.
    """
    from rich.markup import escape
    from rich.table import Table

    from rollgym.sandbox.doctor import doctor as examine_all
    from rollgym.sandbox.types import Level

    findings = examine_all()
    if as_json:
        rows = [asdict(finding) | {"level": finding.level.name.lower()} for finding in findings]
        print_json(rows)
    else:
        table = Table("backend", "walls", "works", "what to know", box=None, pad_edge=False)
        for finding in findings:
            words = list(finding.weaknesses)
            if not finding.works:
                words = [finding.reason, f"Fix: {finding.fix}."]
            elif finding.python:
                words.insert(0, f"Python inside: {finding.python}.")
            table.add_row(
                f"[bold]{finding.backend}[/]",
                finding.level.name.lower(),
                f"yes, {finding.seconds:.2f} s" if finding.works else "no",
                escape("\n".join(words)),
            )
        console().print(table)
        console().print(f"\nWithout a word about it, {_taken(findings)}.", style="dim")
    if not any(finding.works and finding.level > Level.NONE for finding in findings):
        raise typer.Exit(1)


def _taken(findings: list[Finding]) -> str:
    from rollgym.sandbox.open import AUTOMATIC
    from rollgym.sandbox.types import SandboxSettings

    least = SandboxSettings().minimum
    for finding in findings:
        if finding.works and finding.backend in AUTOMATIC and finding.level >= least:
            return f"{finding.backend} is used here"
    return "code is refused here: no walls that work are strong enough"
