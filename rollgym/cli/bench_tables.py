"""Terminal tables of suites and their comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from rollgym.bench.markdown import HEAD, interval, remarks, share, table
from rollgym.utils.cli_options import console, number

if TYPE_CHECKING:
    from rich.console import Console

    from rollgym.bench.suite import Suite


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
        "entry",
        "metric",
        "tasks",
        "A",
        "B",
        "A - B",
        "95% CI",
        "p-value",
        "A better",
        "B better",
        box=None,
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
