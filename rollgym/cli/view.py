"""``rollgym view``: look at a run, in one file or while it goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollgym.errors import UsageError

if TYPE_CHECKING:
    pass


EPILOG = "Example: rollgym view runs/my-run --export report.html, or rollgym view --live runs/my-run"
PAGE = "report.html"


def view(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a training or an evaluation.", show_default=False),
    ],
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the page.", show_default=f"RUN/{PAGE}")
    ] = None,
    episodes: Annotated[int, typer.Option(help="How many episodes the file may hold.")] = 5_000,
    live: Annotated[bool, typer.Option("--live", help="Serve the page and follow the run.")] = False,
    port: Annotated[
        int, typer.Option(help="Where --live listens, on this machine only; 0 takes a free port.")
    ] = 8321,
) -> None:
    """Look at a run: numbers, curves, episodes, tokens, the scheduler's timeline.

    Writes one HTML file that opens from disk without a network; with --live serves the same page and
    follows a run while it is written.
    """
    if live:
        if export is not None:
            raise UsageError("--live serves the page, and --export writes it: give one of the two.")
        _serve(run, port)
        return
    from rollgym.view.export import export as write

    done = write(run, export or run / PAGE, episodes=episodes)
    for note in done.notes:
        typer.echo(f"note: {note}")
    held = "all" if done.shown == done.episodes else f"{done.shown:,} of"
    typer.echo(
        f"{done.path} ({done.size / 1e6:.1f} MB, {held} {done.episodes:,} episodes): open it in a browser."
    )


def _serve(run: Path, port: int) -> None:
    import asyncio

    from rollgym.signals import when_asked_to_stop
    from rollgym.view.live import HOST, make_server
    from rollgym.web import listening

    if not 0 <= port < 65_536:
        raise UsageError(f"--port must be from 0 to 65535, not {port}.")
    server = make_server(run)
    place = listening(HOST, port)

    async def serve() -> None:
        with when_asked_to_stop(lambda: setattr(server, "should_exit", True)):
            await server.serve(sockets=[place])

    typer.echo(f"{run} is at http://127.0.0.1:{place.getsockname()[1]}/ (Ctrl-C ends).")
    asyncio.run(serve())
