"""``rollgym model``: create the built-in policy, or download a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.core.errors import UnknownName, UsageError
from rollgym.utils.cli_options import AsJson, EnvArgs, EnvModules, console, import_modules, parse_pairs
from rollgym.utils.cli_output import print_json

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = "Example: rollgym model new rollgym/FrozenLake-v0 --out models/lake --size small"

GET_EPILOG = "Example: rollgym model get smollm2"

EnvNames = Annotated[
    list[str],
    typer.Argument(metavar="ENV", help="Environments to play: ids or module:Class.", show_default=False),
]


app = typer.Typer(help="Create or download models.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _models() -> None:
    """Create or download models."""


@app.command("new", epilog=EPILOG)
def new(
    envs: EnvNames,
    out: Annotated[Path, typer.Option(help="The model folder to create.", show_default=False)],
    size: Annotated[
        str, typer.Option(help="tiny, small or base: 0.1, 0.5 or 2.5 million parameters.")
    ] = "small",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    context: Annotated[int, typer.Option(help="Context length in tokens.")] = 2048,
    as_json: AsJson = False,
    env_arg: EnvArgs = None,
    env_module: EnvModules = None,
) -> None:
    """Create a small language model with random weights, to be trained.

    Its tokenizer is built from the text of the environments, which are played for this. The folder is in
    Hugging Face format.
    """
    from rollgym.core.registry import make

    import_modules(env_module)
    kwargs = parse_pairs(env_arg, "--env-arg")
    if kwargs and len(envs) > 1:
        raise UsageError(
            "--env-arg needs exactly one environment, because it does not name the one it is for."
        )
    for env in envs:
        make(env, **kwargs).close()  # reports a misspelled name before torch is loaded
    from rollgym.trainer.builtin_policy.model import make_policy

    with console(stderr=True).status("playing episodes to build the vocabulary"):
        info = make_policy([(env, kwargs) for env in envs], out, size=size, seed=seed, context=context)
    if as_json:
        print_json({"out": str(out), **info.to_json()})
    else:
        _print(info, console())


@app.command("get", epilog=GET_EPILOG)
def get(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the model: smollm2.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Download a language model and print its folder.

    The model is downloaded and converted once, into the cache ($ROLLGYM_CACHE, default ~/.cache/rollgym).
    Options that take a model folder also accept its name.
    """
    from rollgym.models.zoo import NAMED, describe_model, model_folder

    if name not in NAMED:
        raise UnknownName("model", name, NAMED, f"Available: {', '.join(NAMED)}.")
    folder = model_folder(name)
    if as_json:
        print_json({"out": str(folder), **(describe_model(folder) or {})})
    else:
        print(folder)


def _print(info: Any, screen: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    screen.print(
        f"[bold]{escape(str(info.path))}[/]: {info.parameters:,} parameters, "
        f"{info.vocabulary} tokens in the vocabulary, {info.context} in the context\n",
        highlight=False,
    )
    table = Table("tokens", "instructions", "observation", "action", "turn", "turns that fit", box=None)
    for env in info.envs:
        fit = max(0, int((info.context - env.instruction_tokens) / env.turn_tokens))
        row = (env.instruction_tokens, env.observation_tokens, env.action_tokens, env.turn_tokens, fit)
        table.add_row(f"[bold]{escape(env.id)}[/]", *map(str, row))
    screen.print(table)
