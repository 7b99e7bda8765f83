"""``rollgym view``: a run as an HTML page, exported or live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollgym.core.errors import UsageError

EPILOG = "Example: rollgym view runs/my-run --export report.html"
PAGE = "report.html"


def view(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run folder of `rollgym train`, `eval` or `bench run`.", show_default=False
        ),
    ],
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the page.", show_default=f"RUN/{PAGE}")
    ] = None,
    episodes: Annotated[int, typer.Option(help="Maximum number of episodes in the file.")] = 5_000,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page and follow the run instead of writing a file.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port of --live on 127.0.0.1; 0 picks a free one.")] = 8321,
) -> None:
    """Show a run as an HTML page: metrics, curves, episodes, tokens, the scheduler's timeline.

    Writes one HTML file that opens from disk without a network. With --live it serves the same page and
    follows the run while it is written.
    """
    if live:
        if export is not None:
            raise UsageError("--live and --export exclude each other: pass one of the two.")
        _serve(run, port)
        return
    from rollgym.view.export import export as write

    done = write(run, export or run / PAGE, episodes=episodes)
    for note in done.notes:
        typer.echo(f"note: {note}")
    shown = "all" if done.shown == done.episodes else f"{done.shown:,} of"
    typer.echo(
        f"{done.path} ({done.size / 1e6:.1f} MB, {shown} {done.episodes:,} episodes): open it in a browser."
    )


def _serve(run: Path, port: int) -> None:
    import asyncio

    from rollgym.utils.http_server import listening
    from rollgym.utils.signals import when_asked_to_stop
    from rollgym.view.live import HOST, make_server

    if not 0 <= port < 65_536:
        raise UsageError(f"--port must be from 0 to 65535, not {port}.")
    server = make_server(run)
    listener = listening(HOST, port)

    async def serve() -> None:
        with when_asked_to_stop(lambda: setattr(server, "should_exit", True)):
            await server.serve(sockets=[listener])

    typer.echo(f"Serving {run} at http://127.0.0.1:{listener.getsockname()[1]}/ (Ctrl-C stops).")
    asyncio.run(serve())
