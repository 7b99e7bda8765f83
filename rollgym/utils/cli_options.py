"""Options that several commands share, and parsing of their values."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.core.errors import MissingExtra, UsageError
from rollgym.core.text import number as number  # used by commands of other packages
from rollgym.utils.cli_output import print_json

if TYPE_CHECKING:
    from rich.console import Console


def complete_env(incomplete: str) -> list[str]:
    """Shell completion: environment ids with this prefix."""
    from rollgym.core.registry import list_envs

    return [info.env_id for info in list_envs() if info.env_id.startswith(incomplete)]


def complete_agent(incomplete: str) -> list[str]:
    """Shell completion: agent names with this prefix."""
    from rollgym.core.agent import list_agents

    return [info.name for info in list_agents() if info.name.startswith(incomplete)]


def _repeatable(flag: str, metavar: str, text: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=f"{text} (repeatable).")


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
    list[str] | None, _repeatable("--env-module", "MODULE", "Import a module that registers environments")
]
EnvArgs = Annotated[
    list[str] | None, _repeatable("--env-arg", "KEY=VALUE", "Argument for the environment, as JSON or text")
]
AgentModules = Annotated[
    list[str] | None, _repeatable("--agent-module", "MODULE", "Import a module that registers agents")
]
AgentArgs = Annotated[
    list[str] | None, _repeatable("--agent-arg", "KEY=VALUE", "Option for the agent, as JSON or text")
]
Roles = Annotated[
    list[str] | None,
    _repeatable("--role", "ROLE=AGENT", "Give a role of the environment to another agent"),
]
RoleArgs = Annotated[
    list[str] | None,
    _repeatable("--role-arg", "ROLE.KEY=VALUE", "Option for the agent of a role, as JSON or text"),
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
Resume = Annotated[bool, typer.Option("--resume", help="Play the episodes that --out lacks or that failed.")]
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


def parse_roles(
    roles: Iterable[str] | None, arguments: Iterable[str] | None
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Parse --role and --role-arg into (agent, options) by role."""
    agents: dict[str, tuple[str, dict[str, Any]]] = {}
    for pair in roles or ():
        role, equals, agent = pair.partition("=")
        if not equals or not role or not agent:
            raise UsageError(f"--role {pair!r}: expected ROLE=AGENT, as in player_2=expert.")
        agents[role] = (agent, {})
    for pair in arguments or ():
        role, dot, rest = pair.partition(".")
        if not dot or role not in agents:
            name = pair.partition("=")[0]  # without the value: it may be a secret
            raise UsageError(f"--role-arg {name!r}: expected ROLE.KEY=VALUE for a role given with --role.")
        agents[role][1].update(parse_pairs([rest], "--role-arg"))
    return agents


def model_options(model: str | None, base_url: str | None) -> dict[str, Any]:
    """--model and --base-url as options of an agent."""
    options = {"model": model, "base_url": base_url}
    return {name: value for name, value in options.items() if value is not None}


def check_resume(resume: bool, out: Path | None) -> None:
    """Raise `UsageError` for --resume without --out."""
    if resume and out is None:
        raise UsageError("--resume needs --out DIR, the results folder to finish.")


def read_api_key(variable: str | None) -> str | None:
    """Return the key in the environment variable that --api-key-env names; None without the option."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable, "")):
        raise UsageError(f"--api-key-env: the variable {variable} is empty or not set.")
    return key


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


def print_result(value: Any, as_json: bool, render: Callable[[Console, Any], None]) -> None:
    """Print a result as JSON to stdout, or let ``render`` print it to a console."""
    if as_json:
        print_json(value)
    else:
        render(console(), value)
