"""Options that several commands share, and parsing of their values."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.core.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "AgentArgs",
    "AgentModules",
    "AgentName",
    "AsJson",
    "BaseUrl",
    "Concurrency",
    "EnvArgs",
    "EnvModules",
    "EnvName",
    "KeepFailed",
    "ModelName",
    "WeakSandbox",
    "Workers",
    "console",
    "import_modules",
    "interval",
    "model_options",
    "needs_extra",
    "number",
    "parse_pairs",
    "say_notes",
]


def complete_env(incomplete: str) -> list[str]:
    """Shell completion: environment ids with this prefix."""
    from rollgym.core.registry import list_envs

    return [info.env_id for info in list_envs() if info.env_id.startswith(incomplete)]


def complete_agent(incomplete: str) -> list[str]:
    """Shell completion: agent names with this prefix."""
    from rollgym.core.agent import list_agents

    return [info.name for info in list_agents() if info.name.startswith(incomplete)]


EnvName = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="Environment: an id (rollgym/Sokoban-v0, CartPole-v1) or module:Class.",
        show_default=False,
        autocompletion=complete_env,
    ),
]
AgentName = Annotated[
    str,
    typer.Option(
        "--agent", help="Agent: a name from `rollgym agents`, or module:name.", autocompletion=complete_agent
    ),
]
EnvModules = Annotated[
    list[str] | None,
    typer.Option(
        "--env-module", metavar="MODULE", help="Import a module that registers environments (repeatable)."
    ),
]
EnvArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--env-arg", metavar="KEY=VALUE", help="Argument for the environment, as JSON or text (repeatable)."
    ),
]
AgentModules = Annotated[
    list[str] | None,
    typer.Option(
        "--agent-module", metavar="MODULE", help="Import a module that registers agents (repeatable)."
    ),
]
AgentArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--agent-arg", metavar="KEY=VALUE", help="Option for the agent, as JSON or text (repeatable)."
    ),
]
WeakSandbox = Annotated[
    bool,
    typer.Option("--allow-weak-sandbox", help="Accept sandbox settings of the file that weaken the sandbox."),
]
KeepFailed = Annotated[
    bool, typer.Option("--keep-failed", help="With --resume: do not play failed episodes again.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of tables.")]
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="Model of an agent that uses one: a folder or an endpoint's name."),
]
BaseUrl = Annotated[
    str | None, typer.Option("--base-url", help="For the chat agent: URL of the endpoint, up to /v1.")
]
Workers = Annotated[int, typer.Option("--workers", help="Worker processes; 0 plays in this process.")]
Concurrency = Annotated[
    int,
    typer.Option("--concurrency", help="Episodes in flight; 0 derives it from the agent and the workers."),
]


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Convert a missing third-party package inside the block to `MissingExtra`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("rollgym"):
            raise
        raise MissingExtra(what, extra) from error


def parse_pairs(pairs: Iterable[str] | None, flag: str) -> dict[str, Any]:
    """Parse ``key=value`` words into a dict; a value is JSON if it parses as JSON, else text."""
    values: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            # Without the value: it may be a secret.
            raise UsageError(f"{flag} {key!r}: expected key=value.")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values


def model_options(model: str | None, base_url: str | None) -> dict[str, Any]:
    """--model and --base-url as options of an agent."""
    options = {"model": model, "base_url": base_url}
    return {name: value for name, value in options.items() if value is not None}


def import_modules(modules: Iterable[str] | None, flag: str = "--env-module") -> tuple[str, ...]:
    """Import the modules that the user named, and return their names for the worker processes."""
    from rollgym.core.registry import import_module

    names = tuple(modules or ())
    for name in names:
        import_module(name, flag)
    return names


def console(*, stderr: bool = False) -> Console:
    """A rich console; plain text where the output is not a terminal."""
    from rollgym.utils.rich_console import SafeConsole

    if not (sys.stderr if stderr else sys.stdout).isatty():
        # A fixed width: tables in a file must not be cut to a guessed terminal size.
        return SafeConsole(stderr=stderr, width=140, soft_wrap=False)
    return SafeConsole(stderr=stderr)


def say_notes(notes: Iterable[str]) -> None:
    """Print notes to stderr, one line each, without control characters."""
    for note in notes:
        line = " ".join("".join(c if c.isprintable() else " " for c in note).split())
        typer.echo(f"rollgym: note: {line}", err=True)


def interval(low_high: list[float] | tuple[float, float] | None, digits: int = 3) -> str:
    """Format an interval for a table."""
    return "" if low_high is None else f"[{low_high[0]:.{digits}f}, {low_high[1]:.{digits}f}]"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number for a table; ``None`` is a dash."""
    return "–" if value is None else f"{value:.{digits}f}"
