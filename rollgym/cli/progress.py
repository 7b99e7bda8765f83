"""Progress display of a running evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rollgym.utils.cli_options import console

if TYPE_CHECKING:
    from rich.console import Console

    from rollgym.core.types import Episode
    from rollgym.evaluation.run_warnings import RunWarning
    from rollgym.evaluation.runner import Evaluation

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
