"""``rollgym compare``: paired comparison of two evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollgym.utils.cli_options import AsJson, console, number
from rollgym.utils.cli_output import print_json

EPILOG = "Example: rollgym compare runs/random runs/expert"

Folder = Annotated[Path, typer.Argument(help="A results folder of `rollgym eval`.", show_default=False)]


def compare(a: Folder, b: Folder, as_json: AsJson = False) -> None:
    """Compare two evaluations task by task.

    Shows the difference with its 95% confidence interval and p-value.
    Only tasks that both played from the same seed count, so task difficulty cancels out.
    """
    from rollgym.evaluation.compare import compare_runs

    result = compare_runs(a, b)
    if as_json:
        print_json(result)
    else:
        _print(result)


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("metric", "A", "B", "A - B", "95% CI", "p-value", "A better", "B better", "equal", box=None)
    for name in ("success", "return"):
        row: dict[str, Any] | None = result[name]
        if row is None:
            continue
        table.add_row(
            name,
            number(row["mean_a"]),
            number(row["mean_b"]),
            f"[bold]{row['difference']:+.3f}[/]",
            f"[{row['low']:+.3f}, {row['high']:+.3f}]",
            f"{row['p_value']:.4f}",
            str(row["a_better"]),
            str(row["b_better"]),
            str(row["equal"]),
        )
    screen = console()
    screen.print(f"A: {result['a']['agent']} ({result['a']['out']})", highlight=False)
    screen.print(f"B: {result['b']['agent']} ({result['b']['out']})", highlight=False)
    screen.print(f"{result['env']}, {result['tasks']} tasks in both\n", highlight=False)
    screen.print(table)
    for warning in result["warnings"]:
        screen.print(f"note: {warning}", style="yellow", highlight=False)
