"""The ``rollgym`` command. Each subcommand is a file; heavy imports happen when one runs."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from contextlib import nullcontext
from types import TracebackType
from typing import Annotated, Any

import typer

from rollgym.cli import (
    bench,
    check,
    envs,
    evaluate,
    export,
    new,
    play,
    replay,
    rescore,
    sandbox,
    serve,
    serve_env,
    trace,
    view,
)
from rollgym.core.errors import RollgymError, one_line, os_reason
from rollgym.core.registry import call_plugins
from rollgym.utils.cli_output import only_json
from rollgym.utils.command_line import note_command
from rollgym.utils.terminal import guarded, printable

COMMAND_GROUP = "rollgym.commands"
"""Entry points of this group are called with the app and add commands to it, as the trainer's does."""
EPILOG = "Example: rollgym play rollgym/Sokoban-v0"

app = typer.Typer(
    name="rollgym",
    help="Reinforcement learning for LLM agents: play, check, evaluate and train on text environments.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would double the startup time
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("envs", epilog=envs.EPILOG)(envs.envs)
app.command("agents", epilog=envs.AGENTS_EPILOG)(envs.agents)
app.command("play", epilog=play.EPILOG)(play.play)
app.command("eval", epilog=evaluate.EPILOG)(evaluate.evaluate)
app.command("compare", epilog=evaluate.COMPARE_EPILOG)(evaluate.compare)
app.command("replay", epilog=replay.EPILOG)(replay.replay)
app.command("rescore", epilog=rescore.EPILOG)(rescore.rescore)
app.command("import", epilog=export.IMPORT_EPILOG)(export.import_)
app.command("check", epilog=check.EPILOG)(check.check)
app.command("doctor", epilog=sandbox.DOCTOR_EPILOG)(sandbox.doctor)
app.command("new", epilog=new.EPILOG)(new.new)
app.command("trace", epilog=trace.EPILOG)(trace.trace)
app.command("serve", epilog=serve.EPILOG)(serve.serve)
app.command("serve-env", epilog=serve_env.EPILOG)(serve_env.serve_env)
app.command("view", epilog=view.EPILOG)(view.view)
app.add_typer(bench.app, name="bench")
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(export.app, name="export")
call_plugins(COMMAND_GROUP, "commands", app)


def _show_version(requested: bool) -> None:
    if requested:
        from rollgym.core.version import __version__

        typer.echo(f"rollgym {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks; accepted by every command.")
    ] = False,
) -> None:
    """Accept the options of every command."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: a usage error is one sentence and exit code 2, a failure is exit code 1."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    warnings.showwarning = _show_warning
    note_command(words)
    with guarded():
        _run(words, debug)


def _run(words: list[str], debug: bool) -> None:
    try:
        with only_json() if "--json" in words else nullcontext():
            app([word for word in words if word != "--debug"])
    except RollgymError as error:
        _leave(error, str(error), error.exit_code, debug)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # The reader of our output (head, less) has exited: not an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        where = f" {error.filename}" if error.filename else ""
        _leave(error, f"Cannot read or write{where}: {os_reason(error)} (--debug shows where)", 1, debug)
    except Exception as error:
        _leave(error, f"Unexpected error: {one_line(error)} (--debug shows where)", 1, debug)


def _show_warning(message: Warning | str, *rest: Any, **more: Any) -> None:
    """Print a warning as one sentence, without the line of code that raised it."""
    typer.echo(f"rollgym: note: {' '.join(str(message).split())}", err=True)


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback without control characters."""
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))


def _leave(error: Exception, sentence: str, code: int, debug: bool) -> Any:
    if debug:
        sys.excepthook = _show_traceback
        raise error
    typer.echo(f"rollgym: {sentence}", err=True)
    sys.exit(code)
