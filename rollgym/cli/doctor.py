"""``rollgym doctor``: test which sandboxes work on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from rollgym.utils.cli_options import AsJson, console
from rollgym.utils.cli_output import print_json

if TYPE_CHECKING:
    from rollgym.sandbox.doctor import Finding

EPILOG = "Example: rollgym doctor --json | jq '.[] | select(.works).backend'"


def doctor(as_json: AsJson = False) -> None:
    """Test every sandbox backend on this machine.

    Shows for each whether it works, what is missing and how to fix it. Exit code 1 if no backend isolates
    code.
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
