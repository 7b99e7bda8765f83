"""``rollgym trace``: timeline and utilization of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.core.errors import UsageError
from rollgym.utils.cli_options import AsJson, print_result

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = "Example: rollgym trace runs/my-run --out trace.json"


def trace(
    run: Annotated[Path, typer.Argument(help="A run folder, or its events.jsonl.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="File for the trace.", show_default="RUN/trace.json")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the timeline and utilization of a run.

    Writes a Chrome/Perfetto trace (one track per engine slot and worker) and prints utilization and the
    longest waits with their causes.
    """
    from rollgym.core.files import write_output
    from rollgym.rollout.events import read_events
    from rollgym.rollout.trace import chrome_trace, is_event, summary

    file = run / "events.jsonl" if run.is_dir() else run
    if not file.exists():
        raise UsageError(f"{run} has no events.jsonl: only a run that recorded events can be traced.")
    events = [event for event in read_events(file) if is_event(event)]
    target = out or file.with_name("trace.json")
    write_output(target, json.dumps(chrome_trace(events)).encode())
    print_result(summary(events) | {"trace": str(target)}, as_json, _print)


def _print(screen: Console, result: dict[str, Any]) -> None:
    from rich.table import Table

    from rollgym.rollout.watchdog import WAITS_FOR

    screen.print(f"{result['episodes']} episodes in {result['seconds']:.2f} s", highlight=False)
    screen.print(
        f"engine utilization {result['engine_busy']:.1%}, environment utilization "
        f"{result['environment_busy']:.1%}",
        highlight=False,
    )
    table = Table("longest waits", "state", "turn", "seconds", "at (s)", "waits for", box=None)
    for wait in result["longest_waits"]:
        table.add_row(
            wait["episode"],
            wait["state"],
            str(wait["turn"]),
            f"{wait['seconds']:.3f}",
            f"{wait['at']:.2f}",
            WAITS_FOR.get(wait["state"], ""),
        )
    screen.print(table)
    screen.print(f"trace: {result['trace']} (open it in Perfetto)", highlight=False)
