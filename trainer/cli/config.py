"""``rollgym config``: list, show and explain the settings of `rollgym train` and `rollgym sft`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from rollgym.trainer.cli.options import Words, complete_any_config, config_argument
from rollgym.utils.cli_options import AsJson, EnvModules, console, import_modules, needs_extra
from rollgym.utils.cli_output import print_json

app = typer.Typer(
    help="List, show and explain training configs.", no_args_is_help=True, rich_markup_mode=None
)

LIST_EPILOG = "Example: rollgym config list"
SHOW_EPILOG = "Example: rollgym config show frozen-lake-grpo stop.steps=10"
EXPLAIN_EPILOG = "Example: rollgym config explain loss"
SCHEMA_EPILOG = "Example: rollgym config schema > train.schema.json"


OfSFT = Annotated[
    bool, typer.Option("--sft", help="The settings of `rollgym sft` instead of `rollgym train`.")
]


@app.callback()
def _config() -> None:
    """List, show and explain training configs."""


@app.command("list", epilog=LIST_EPILOG)
def names(as_json: AsJson = False) -> None:
    """List the shipped configs by name: those of `rollgym train` and, named *-sft, of `rollgym sft`."""
    from rollgym.trainer import config_files
    from rollgym.trainer.sft import config_files as sft_files

    configs = sorted([*config_files.known_configs(), *sft_files.known_configs()])
    print_json(configs) if as_json else print("\n".join(configs))


@app.command("show", epilog=SHOW_EPILOG)
def show(
    config: Annotated[str, config_argument(complete_any_config)],
    overrides: Words = None,
    as_json: AsJson = False,
    env_module: EnvModules = None,
) -> None:
    """Print all settings of a config as YAML, including defaults.

    Validates the config and starts nothing.
    """
    from rollgym.config.loader import dump, load, values_of
    from rollgym.trainer.config_files import find_config
    from rollgym.trainer.sft.config_files import is_sft, known_configs

    import_modules(env_module)
    of_sft = is_sft(config)
    path = known_configs().get(config) if of_sft else None
    settings = load(root_model(of_sft), path or find_config(config), overrides or ())
    print_json(values_of(settings)) if as_json else print(dump(settings).rstrip())


@app.command("explain", epilog=EXPLAIN_EPILOG)
def explain(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Only this key and the keys below it.")
    ] = None,
    of_sft: OfSFT = False,
    as_json: AsJson = False,
) -> None:
    """List all settings with type, default and description."""
    from rich.markup import escape
    from rich.table import Table

    from rollgym.config.loader import explain as rows_of

    rows = rows_of(root_model(of_sft), key)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True, style="bold")
    for name in ("type", "default", "description"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, (row.key, row.type, row.default, row.description)))
    console().print(table)


@app.command("schema", epilog=SCHEMA_EPILOG)
def schema(of_sft: OfSFT = False) -> None:
    """Print the JSON schema of a config file, for editors that complete and check YAML."""
    from rollgym.config.loader import schema as schema_of

    print_json(schema_of(root_model(of_sft)), indent=2)


def root_model(of_sft: bool = False) -> Any:
    """The type of a training config."""
    with needs_extra("Training", "train"):
        if of_sft:
            from rollgym.trainer.sft.config import SFTConfig

            return SFTConfig
        from rollgym.trainer.config import TrainConfig

        return TrainConfig
