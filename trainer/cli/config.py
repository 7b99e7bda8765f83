"""``rollgym config``: list, show and explain the settings of `rollgym train`, `sft` and `dpo`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from rollgym.core.errors import UsageError
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


Command = Literal["train", "sft", "dpo"]
OfSFT = Annotated[
    bool, typer.Option("--sft", help="The settings of `rollgym sft` instead of `rollgym train`.")
]
OfDPO = Annotated[
    bool, typer.Option("--dpo", help="The settings of `rollgym dpo` instead of `rollgym train`.")
]


@app.callback()
def _config() -> None:
    """List, show and explain training configs."""


@app.command("list", epilog=LIST_EPILOG)
def names(as_json: AsJson = False) -> None:
    """List the shipped configs by name.

    Those named *-sft are configs of `rollgym sft`, those named *-dpo of `rollgym dpo`, all others of
    `rollgym train`.
    """
    from rollgym.trainer import config_files
    from rollgym.trainer.dpo import config_files as dpo_files
    from rollgym.trainer.sft import config_files as sft_files

    modules = (config_files, sft_files, dpo_files)
    configs = sorted(name for module in modules for name in module.known_configs())
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
    from rollgym.trainer.dpo import config_files as dpo_files
    from rollgym.trainer.sft import config_files as sft_files

    import_modules(env_module)
    command: Command = "sft" if sft_files.is_sft(config) else "train"
    command = "dpo" if dpo_files.is_dpo(config) else command
    path = (sft_files.known_configs() | dpo_files.known_configs()).get(config)
    settings = load(root_model(command), path or find_config(config), overrides or ())
    print_json(values_of(settings)) if as_json else print(dump(settings).rstrip())


@app.command("explain", epilog=EXPLAIN_EPILOG)
def explain(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="Only this key and the keys below it.")
    ] = None,
    of_sft: OfSFT = False,
    of_dpo: OfDPO = False,
    as_json: AsJson = False,
) -> None:
    """List all settings with type, default and description."""
    from rich.markup import escape
    from rich.table import Table

    from rollgym.config.loader import explain as rows_of

    rows = rows_of(root_model(_command(of_sft, of_dpo)), key)
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
def schema(of_sft: OfSFT = False, of_dpo: OfDPO = False) -> None:
    """Print the JSON schema of a config file, for editors that complete and check YAML."""
    from rollgym.config.loader import schema as schema_of

    print_json(schema_of(root_model(_command(of_sft, of_dpo))), indent=2)


def _command(of_sft: bool, of_dpo: bool) -> Command:
    if of_sft and of_dpo:
        raise UsageError("--sft and --dpo cannot be combined.")
    return "sft" if of_sft else "dpo" if of_dpo else "train"


def root_model(command: Command = "train") -> Any:
    """The type of a training config."""
    with needs_extra("Training", "train"):
        if command == "dpo":
            from rollgym.trainer.dpo.config import DPOConfig

            return DPOConfig
        if command == "sft":
            from rollgym.trainer.sft.config import SFTConfig

            return SFTConfig
        from rollgym.trainer.config import TrainConfig

        return TrainConfig
