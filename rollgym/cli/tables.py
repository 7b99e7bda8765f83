"""Terminal tables of evaluations, suites and their comparisons, and a progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rollgym.bench.summary import HEAD, remarks, table
from rollgym.core.text import interval, number
from rollgym.utils.cli_options import console

if TYPE_CHECKING:
    from rich.console import Console

    from rollgym.bench.suite import Suite
    from rollgym.core.types import Episode
    from rollgym.evaluation.run_warnings import RunWarning
    from rollgym.evaluation.runner import Evaluation


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
    for role, own in summary.get("roles", {}).items():
        rate = "–" if own["success_rate"] is None else f"{own['success_rate']:.3f}"
        words = f"success {rate}  return {number(own['mean_return'])}"
        table.add_row(escape(role), f"{escape(own['player'] or summary['agent'])}  {words}")
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
def counted(label: str, total: int) -> Iterator[Callable[[object], None]]:
    """A progress bar in a terminal that each call advances; nothing elsewhere."""
    screen = console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(label, total=total or None)
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
        f"[bold]{number(summary['success'])}[/] {escape(interval(summary['success_ci']))}",
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


_METRICS = ("success", "return")
_COMPARED: dict[str, Callable[[dict[str, Any]], str]] = {
    "tasks": lambda row: str(row["tasks"]),
    "A": lambda row: number(row["mean_a"]),
    "B": lambda row: number(row["mean_b"]),
    "A - B": lambda row: f"[bold]{row['difference']:+.3f}[/]",
    "95% CI": lambda row: escape(f"[{row['low']:+.3f}, {row['high']:+.3f}]"),
    "p-value": lambda row: f"{row['p_value']:.4f}",
    "A better": lambda row: str(row["a_better"]),
    "B better": lambda row: str(row["b_better"]),
    "equal": lambda row: str(row["equal"]),
}
"""Columns of a paired comparison (`rollgym.evaluation.stats.Paired`)."""


def print_comparison(screen: Console, result: dict[str, Any]) -> None:
    """Print a paired comparison of two evaluations, or of two results of a suite entry by entry."""
    for side in ("a", "b"):
        line = f"{side.upper()}: {result[side]['agent']} ({result[side]['out']})"
        screen.print(escape(line), highlight=False)
    labels: tuple[str, ...]
    rows: list[tuple[tuple[str, ...], dict[str, Any] | None]]
    if "suite" in result:
        heading, labels, left_out = "{name} {version}".format(**result["suite"]), ("entry", "metric"), "equal"
        rows = [((name, metric), e[metric]) for name, e in result["entries"].items() for metric in _METRICS]
        rows.append((("all", "success"), result["success"]))
    else:
        heading, labels, left_out = f"{result['env']}, {result['tasks']} tasks in both", ("metric",), "tasks"
        rows = [((metric,), result[metric]) for metric in _METRICS]
    columns = [name for name in _COMPARED if name != left_out]
    screen.print(f"{heading}\n", highlight=False)
    grid = Table(*labels, *columns, box=None)
    for names, row in rows:
        if row is not None:
            grid.add_row(*names, *(_COMPARED[column](row) for column in columns))
    screen.print(grid)
    for note in result["notes"] if "suite" in result else result["warnings"]:
        screen.print(f"note: {note}", style="yellow", markup=False, highlight=False)


PLAIN_EVERY = 10.0
"""Seconds between progress lines when the output is not a terminal."""


def play(evaluation: Evaluation, stop: Callable[[], None], *, quiet: bool) -> None:
    """Run an evaluation with a progress display; Ctrl-C calls ``stop``."""
    from rollgym.utils.async_runner import run_to_end

    with EpisodeProgress(console(stderr=True), evaluation, quiet=quiet):
        _, stop_request = run_to_end(evaluation.run, stop)
    evaluation.exit_code = stop_request.exit_code


class EpisodeProgress:
    """A progress bar in a terminal; a line every ten seconds elsewhere; nothing when a person plays."""

    def __init__(self, console: Console, evaluation: Evaluation, *, quiet: bool = False) -> None:
        self._live = console.is_terminal and not quiet
        self._plain = not console.is_terminal and not quiet
        self._console = console
        self._evaluation = evaluation
        self._total = len(evaluation.plan.specs)
        self._wins = self._scored = self._failed = 0
        self._last = time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self._live,
        )
        evaluation.on_episode = self.add
        evaluation.on_warning = self.warn

    def __enter__(self) -> EpisodeProgress:
        folder = self._evaluation.folder
        if folder.repaired:
            self._console.print(
                "The last line of episodes.jsonl was incomplete and has been removed.", style="yellow"
            )
        if folder.done and not self._plain:
            self._console.print(f"Resuming after {len(folder.done)} finished episodes.", style="dim")
        for episode in folder.done:
            self._count(episode)
        self._bar.start()
        self._task = self._bar.add_task(
            self._evaluation.plan.request.env_name,
            total=self._total,
            completed=len(folder.done),
            numbers=self._numbers(),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, episode: Episode) -> None:
        """Count a finished episode and show it."""
        self._count(episode)
        self._bar.update(self._task, advance=1, numbers=self._numbers())
        if self._plain and time.monotonic() - self._last > PLAIN_EVERY:
            self._last = time.monotonic()
            self._console.print(f"{len(self._evaluation.folder.done)}/{self._total} {self._numbers()}")

    def warn(self, warning: RunWarning) -> None:
        """Show a warning immediately."""
        env_id = self._evaluation.plan.request.env_name
        self._console.print(f"warning: {env_id}: {warning.sentence}", style="yellow", markup=False)

    def _count(self, episode: Episode) -> None:
        self._failed += episode.outcome.failed
        if episode.scored_success is not None:
            self._scored += 1
            self._wins += episode.scored_success

    def _numbers(self) -> str:
        words = [f"success {self._wins / self._scored:.1%}"] if self._scored else []
        if self._failed:
            words.append(f"[red]failed {self._failed}[/]")
        return "  ".join(words)
