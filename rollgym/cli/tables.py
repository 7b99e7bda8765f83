"""Terminal tables of evaluations, suites and their comparisons, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from rollgym.bench.summary import HEAD, remarks, share, table
from rollgym.utils.cli_options import console, interval, number

if TYPE_CHECKING:
    from rich.console import Console

    from rollgym.bench.suite import Suite


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


@contextmanager
def counted(what: str, total: int) -> Iterator[Callable[[object], None]]:
    """A progress bar in a terminal that each call advances; nothing elsewhere."""
    screen = console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(what, total=total or None)
        yield lambda done: bar.advance(task)


def print_suite(screen: Console, suite: Suite) -> None:
    """Print the entries of a suite."""
    screen.print(
        f"[bold]{suite.name} {suite.version}[/]  {escape(suite.summary)}  (hash {suite.fingerprint})",
        highlight=False,
    )
    grid = Table("entry", "environment", "split", "tasks", "samples", "turns", "tokens", "golden", box=None)
    for entry in suite.entries:
        golden = ", ".join(f"{kind} {score.success:.3f}" for kind, score in entry.golden.items())
        arguments = ", ".join(f"{key}={value}" for key, value in entry.kwargs.items())
        grid.add_row(
            entry.name,
            escape(f"{entry.env} {arguments}".strip()),
            entry.split,
            str(entry.tasks or "all"),
            str(entry.samples),
            str(entry.max_turns or "–"),
            str(entry.max_tokens or "–"),
            f"with --data {entry.name}=..." if entry.data else golden or "–",
        )
    screen.print(grid)


def print_results(screen: Console, summary: dict[str, Any]) -> None:
    """Print the results of a suite."""
    suite = summary["suite"]
    screen.print(
        f"[bold]{suite['name']} {suite['version']}[/]  {escape(summary['agent'])}  success "
        f"[bold]{share(summary['success'])}[/] {escape(interval(summary['success_ci']))}",
        highlight=False,
    )
    grid = Table(*HEAD, box=None)
    for row in table(summary):
        grid.add_row(*map(escape, row))
    screen.print(grid)
    for sentence in remarks(summary):
        screen.print(escape(sentence), style="yellow", highlight=False)
    if "out" in summary:
        screen.print(f"results: {escape(summary['out'])}", highlight=False)


def print_comparison(screen: Console, result: dict[str, Any]) -> None:
    """Print a paired comparison, entry by entry."""
    for side in ("a", "b"):
        line = f"{side.upper()}: {result[side]['agent']} ({result[side]['out']})"
        screen.print(escape(line), highlight=False)
    screen.print(f"{result['suite']['name']} {result['suite']['version']}\n", highlight=False)
    grid = Table(
        "entry", "metric", "tasks", "A", "B", "A - B", "95% CI", "p-value", "A better", "B better", box=None
    )
    for name, entry in result["entries"].items():
        for metric in ("success", "return"):
            _add(grid, name, metric, entry[metric])
    _add(grid, "all", "success", result["success"])
    screen.print(grid)
    for note in result["notes"]:
        screen.print(f"note: {note}", style="yellow", markup=False, highlight=False)


def _add(grid: Table, name: str, metric: str, row: dict[str, Any] | None) -> None:
    if row is None:
        return
    grid.add_row(
        name,
        metric,
        str(row["tasks"]),
        number(row["mean_a"]),
        number(row["mean_b"]),
        f"[bold]{row['difference']:+.3f}[/]",
        escape(f"[{row['low']:+.3f}, {row['high']:+.3f}]"),
        f"{row['p_value']:.4f}",
        str(row["a_better"]),
        str(row["b_better"]),
    )
