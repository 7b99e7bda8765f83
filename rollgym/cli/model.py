"""``rollgym model``: make the built-in policy, or fetch a model that has a name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollgym.cli.common import AsJson, EnvArgs, EnvModules, console, import_modules, parse_pairs
from rollgym.cli.output import print_json
from rollgym.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = "Example: rollgym model new rollgym/FrozenLake-v0 --out models/lake --size small"

GET_EPILOG = "Example: rollgym model get smollm2"

EnvNames = Annotated[
    list[str],
    typer.Argument(metavar="ENV", help="What it will play: ids or module:Class.", show_default=False),
]


def new(
    envs: EnvNames,
    out: Annotated[Path, typer.Option(help="The folder to make.", show_default=False)],
    size: Annotated[str, typer.Option(help="tiny, small or base: 0.1, 0.5 or 2.5 M parameters.")] = "small",
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    context: Annotated[int, typer.Option(help="The longest conversation, in tokens.")] = 2048,
    as_json: AsJson = False,
    env_arg: EnvArgs = None,
    env_module: EnvModules = None,
) -> None:
    """Make a small language model that can be trained to play.

    It has random weights, and a tokenizer for the text of the environments, which are played for this.
    The folder is in Hugging Face format.
    """
    from rollgym.registry import make

    import_modules(env_module)
    kwargs = parse_pairs(env_arg, "--env-arg")
    if kwargs and len(envs) > 1:
        raise UsageError("--env-arg goes with a single environment: which of them it is for cannot be told.")
    for env in envs:
        make(env, **kwargs).close()  # a misspelt name is said before torch is loaded
    # By name: the core imports nothing of the trainer.
    maker: Any = importlib.import_module("rollgym.trainer.model")
    with console(stderr=True).status("playing to collect the vocabulary"):
        info = maker.make_policy([(env, kwargs) for env in envs], out, size=size, seed=seed, context=context)
    if as_json:
        print_json({"out": str(out), **info.to_json()})
    else:
        _print(info, console())


def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Fetch a language model that has a name, and print its folder.

    It is fetched and converted once, into the cache ($ROLLGYM_CACHE or ~/.cache/rollgym). Wherever a model's
    folder is asked for, its name will do.
    """
    from rollgym.pretrained import NAMED, describe_model, model_folder

    if name not in NAMED:
        raise UnknownName("model", name, NAMED, f"There is: {', '.join(NAMED)}.")
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
