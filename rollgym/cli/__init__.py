"""The ``rollgym`` command. Each subcommand is a file; heavy imports wait until one runs."""

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
    compare,
    config,
    doctor,
    envs,
    evaluate,
    model,
    new,
    plan,
    play,
    replay,
    sandbox,
    serve,
    shop,
    trace,
    train,
    view,
)
from rollgym.cli.output import only_json
from rollgym.command_line import note_command
from rollgym.errors import RollgymError, one_line, os_reason
from rollgym.terminal import guarded, printable

EPILOG = "Start with: rollgym envs, then rollgym play rollgym/Sokoban-v0."

app = typer.Typer(
    name="rollgym",
    help="Play, check and evaluate multi-turn text environments, and train agents on them.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would double the time until it shows
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("envs", epilog=envs.EPILOG)(envs.envs)
app.command("agents", epilog=envs.AGENTS_EPILOG)(envs.agents)
app.command("play", epilog=play.EPILOG)(play.play)
app.command("eval", epilog=evaluate.EPILOG)(evaluate.evaluate)
app.command("compare", epilog=compare.EPILOG)(compare.compare)
app.command("replay", epilog=replay.EPILOG)(replay.replay)
app.command("check", epilog=check.EPILOG)(check.check)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.command("new", epilog=new.EPILOG)(new.new)
app.command("train", epilog=train.EPILOG)(train.train)
app.command("plan", epilog=plan.EPILOG)(plan.plan)
app.command("imitate", epilog=train.IMITATE_EPILOG)(train.imitate)
app.command("trace", epilog=trace.EPILOG)(trace.trace)
app.command("serve", epilog=serve.EPILOG)(serve.serve)
app.command("view", epilog=view.EPILOG)(view.view)
models = typer.Typer(help="Make or fetch models.", no_args_is_help=True, rich_markup_mode=None)
models.command("new", epilog=model.EPILOG)(model.new)
models.command("get", epilog=model.GET_EPILOG)(model.get)
app.add_typer(models, name="model")
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(shop.app, name="shop")


@models.callback()
def _models() -> None:
    """Make or fetch models."""


def _show_version(asked: bool) -> None:
    if asked:
        from rollgym import __version__

        typer.echo(f"rollgym {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks (goes with every command).")
    ] = False,
) -> None:
    """Hold the options that go with every command."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: a user's mistake is one sentence and exit code 2, a failure exit code 1."""
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
            # The reader of our output (head, less) has gone; that is no error of ours.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        where = f" {error.filename}" if error.filename else ""
        _leave(error, f"Cannot read or write{where}: {os_reason(error)} (--debug shows where)", 1, debug)
    except Exception as error:
        _leave(error, f"Unexpected error: {one_line(error)} (--debug shows where)", 1, debug)


def _show_warning(message: Warning | str, *rest: Any, **more: Any) -> None:
    """Warnings are for a person here: a sentence, without the line of code that gave it."""
    typer.echo(f"rollgym: note: {' '.join(str(message).split())}", err=True)


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback whose texts cannot reach the terminal as control characters."""
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))


def _leave(error: Exception, sentence: str, code: int, debug: bool) -> Any:
    if debug:
        sys.excepthook = _show_traceback
        raise error
    typer.echo(f"rollgym: {sentence}", err=True)
    sys.exit(code)
