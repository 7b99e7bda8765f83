"""Options that several commands share, and how values are read."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.errors import MissingExtra, UsageError
from rollgym.folders import new_folder

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "AgentArgs",
    "AgentModules",
    "AgentName",
    "AsJson",
    "EnvArgs",
    "EnvModules",
    "EnvName",
    "Name",
    "Words",
    "complete_config",
    "console",
    "import_modules",
    "interval",
    "load_room",
    "model_options",
    "name_and_words",
    "new_folder",
    "number",
    "parse_pairs",
]


def complete_env(incomplete: str) -> list[str]:
    """For shells: the ids of environments that begin so."""
    from rollgym.registry import cards

    return [card.env_id for card in cards() if card.env_id.startswith(incomplete)]


def complete_agent(incomplete: str) -> list[str]:
    """For shells: the names of agents that begin so."""
    from rollgym.agent import agent_cards

    return [card.name for card in agent_cards() if card.name.startswith(incomplete)]


def complete_config(incomplete: str) -> list[str]:
    """For shells: the shipped configurations that begin so."""
    from rollgym.config import known_configs

    return [name for name in known_configs() if name.startswith(incomplete)]


EnvName = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="An id (rollgym/Sokoban-v0, CartPole-v1) or module:Class.",
        show_default=False,
        autocompletion=complete_env,
    ),
]
AgentName = Annotated[
    str,
    typer.Option(
        "--agent",
        help="Who plays: a name from `rollgym agents`, or module:name.",
        autocompletion=complete_agent,
    ),
]
EnvModules = Annotated[
    list[str] | None,
    typer.Option("--env-module", metavar="MODULE", help="Import a module that registers environments."),
]
EnvArgs = Annotated[
    list[str] | None,
    typer.Option("--env-arg", metavar="KEY=VALUE", help="An argument for the environment (repeatable)."),
]
AgentModules = Annotated[
    list[str] | None,
    typer.Option("--agent-module", metavar="MODULE", help="Import a module that registers agents."),
]
AgentArgs = Annotated[
    list[str] | None,
    typer.Option("--agent-arg", metavar="KEY=VALUE", help="An option for the agent (repeatable)."),
]
WeakSandbox = Annotated[
    bool,
    typer.Option("--allow-weak-sandbox", help="Honor sandbox settings of the file that weaken the sandbox."),
]
KeepFailed = Annotated[
    bool, typer.Option("--keep-failed", help="With --resume: leave failed episodes as they are.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


Name = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML file, or a shipped configuration.",
        show_default=False,
        autocompletion=complete_config,
    ),
]
Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.", show_default=False),
]


def name_and_words(config: str | None, settings: list[str] | None) -> tuple[str | None, list[str]]:
    """A configuration and the settings to change, where the first word may be one of the latter."""
    words = list(settings or [])
    if config is not None and "=" in config and not Path(config).exists():
        return None, [config, *words]
    return config, words


def load_room(module: str, what: str, extra: str) -> Any:
    """A module behind a command, by name: the core imports nothing of the rooms."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("rollgym"):
            raise
        raise MissingExtra(what, extra) from error


def parse_pairs(pairs: Iterable[str] | None, flag: str) -> dict[str, Any]:
    """``key=value`` words as a dict; a value is read as JSON where it is JSON, else as text."""
    found: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            # Without the value: it may be something that belongs in no log.
            raise UsageError(f"{flag} {key!r} is not of the form key=value.")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def model_options(model: str | None, base_url: str | None) -> dict[str, Any]:
    """What --model and --base-url say, as options of an agent."""
    given = {"model": model, "base_url": base_url}
    return {name: value for name, value in given.items() if value is not None}


def import_modules(modules: Iterable[str] | None, flag: str = "--env-module") -> tuple[str, ...]:
    """Import what the user named, and give it back for the worker processes."""
    from rollgym.registry import import_module

    names = tuple(modules or ())
    for name in names:
        import_module(name, flag)
    return names


def console(*, stderr: bool = False) -> Console:
    """A rich console; plain text where the output is not a terminal."""
    from rollgym.terminal_rich import SafeConsole

    if not (sys.stderr if stderr else sys.stdout).isatty():
        # A table cut to a guessed width helps nobody who reads it from a file.
        return SafeConsole(stderr=stderr, width=140, soft_wrap=False)
    return SafeConsole(stderr=stderr)


def say_notes(notes: Iterable[str]) -> None:
    """Say remarks on the error stream, one line each; what a terminal would obey is left out."""
    for note in notes:
        line = " ".join("".join(c if c.isprintable() else " " for c in note).split())
        typer.echo(f"rollgym: note: {line}", err=True)


def interval(low_high: list[float] | tuple[float, float] | None, digits: int = 3) -> str:
    """An interval for a table."""
    return "" if low_high is None else f"[{low_high[0]:.{digits}f}, {low_high[1]:.{digits}f}]"


def number(value: float | None, digits: int = 3) -> str:
    """A number for a table; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"
