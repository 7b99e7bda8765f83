"""``rollgym config``: what a training run is told, and what it could be told."""

from __future__ import annotations

import importlib
from dataclasses import asdict
from typing import Annotated, Any

import typer

from rollgym.cli.common import AsJson, EnvModules, complete_config, console, import_modules
from rollgym.cli.output import print_json

app = typer.Typer(help="Look at the settings of a training run.", no_args_is_help=True, rich_markup_mode=None)

LIST_EPILOG = "Example: rollgym config list"
SHOW_EPILOG = "Example: rollgym config show my_run.yaml steps=10"
EXPLAIN_EPILOG = "Example: rollgym config explain loss"
SCHEMA_EPILOG = "Example: rollgym config schema > train.schema.json"

ConfigName = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML file, or the name of a shipped one.",
        show_default=False,
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Settings to change: loss.name=ppo, envs.0.id=...", show_default=False
    ),
]


@app.callback()
def _config() -> None:
    """Look at the settings of a training run."""


@app.command("list", epilog=LIST_EPILOG)
def names(as_json: AsJson = False) -> None:
    """List the configurations that come with rollgym, by name."""
    from rollgym.config import known_configs

    found = sorted(known_configs())
    print_json(found) if as_json else print("\n".join(found))


@app.command("show", epilog=SHOW_EPILOG)
def show(
    config: ConfigName, overrides: Overrides = None, as_json: AsJson = False, env_module: EnvModules = None
) -> None:
    """Print every setting of a run, defaults included, as YAML.

    Nothing is started; a mistake in the file is found here.
    """
    from rollgym.config import dump, find_config, load, values_of

    import_modules(env_module)
    found = load(root_model(), find_config(config), overrides or ())
    print_json(values_of(found)) if as_json else print(dump(found).rstrip())


@app.command("explain", epilog=EXPLAIN_EPILOG)
def explain(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Only this key and what is below it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the settings: type, default and what each is for."""
    from rich.markup import escape
    from rich.table import Table

    from rollgym.config import explain as rows_of

    rows = rows_of(root_model(), key)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True, style="bold")
    for name in ("type", "default", "what"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, (row.key, row.type, row.default, row.description)))
    console().print(table)


@app.command("schema", epilog=SCHEMA_EPILOG)
def schema() -> None:
    """Print the JSON schema of a configuration file, for editors that complete and check YAML."""
    from rollgym.config import schema as schema_of

    print_json(schema_of(root_model()), indent=2)


def root_model() -> Any:
    """The trainer's settings. By name: the core imports nothing of the trainer."""
    # First, because it says so in a sentence where pydantic is not installed.
    importlib.import_module("rollgym.config")
    return importlib.import_module("rollgym.trainer.config").TrainConfig
