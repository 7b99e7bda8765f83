"""Terminal tables of evaluation results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from rollgym.utils.cli_options import interval, number

if TYPE_CHECKING:
    from rich.console import Console


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """Print the results of one evaluation."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    where = f"split {summary['split']}, " if summary["split"] else ""
    table.add_row("environment", f"[bold]{escape(summary['env'])}[/]  ({where}seed {summary['seed']})")
    table.add_row("agent", f"[bold]{escape(summary['agent'])}[/]")
    table.add_row("episodes", f"{summary['episodes']} of {summary['requested']}")
    if summary["success_rate"] is None:
        table.add_row("success", f"– ({summary['success_means']})")
    else:
        table.add_row("success", f"[bold]{summary['success_rate']:.3f}[/]  {interval(summary['success_ci'])}")
    if summary["excluded"]:
        style = "bold red" if summary["many_excluded"] else "yellow"
        whole = summary["success_all"]
        counted = "" if whole is None else f"  success of all episodes {whole:.3f}"
        table.add_row(f"[{style}]excluded[/]", f"[{style}]{summary['excluded']}[/]{counted}")
    table.add_row("return", f"[bold]{number(summary['mean_return'])}[/]  {interval(summary['return_ci'])}")
    if summary["per_task"] > 1:
        table.add_row("pass@k", "  ".join(f"{k}: {value:.3f}" for k, value in summary["pass_at_k"].items()))
    for name, unit, digits in (("length", "turns", 1), ("seconds", "s", 3)):
        parts = summary[name]
        if parts:
            words = "  ".join(f"{key} {parts[key]:.{digits}f}" for key in ("mean", "p50", "p90", "max"))
            table.add_row(f"{name} ({unit})" if name == "length" else "time (s)", words)
    table.add_row("outcomes", "  ".join(f"{k} {v}" for k, v in summary["outcomes"].items()) or "–")
    if summary["usage"]:
        table.add_row("usage", "  ".join(f"{k} {v:,.6g}" for k, v in summary["usage"].items()))
    for failure in summary["errors"]:
        table.add_row("[red]failed[/]", escape(f"{failure['count']}x {failure['message']}"))
    table.add_row("results", escape(summary["out"]))
    console.print(table)
