"""``rollgym sft``: supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollgym.trainer.cli.options import complete_sft_config, config_argument, name_and_words
from rollgym.trainer.cli.train import Out, Plain, Resume, TrustCode, print_evaluations
from rollgym.utils.cli_options import AsJson, EnvModules, console, import_modules, needs_extra
from rollgym.utils.cli_output import print_json

EPILOG = "Example: rollgym sft --data chats.jsonl --model smollm2 --out runs/chats epochs=2"

Name = Annotated[str | None, config_argument(complete_sft_config)]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings to override, such as epochs=2 (`rollgym config explain --sft`).",
        show_default=False,
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="File of conversations (JSONL, Parquet) or episodes, or a run folder (repeatable); data.files.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Model folder, Hub id, or smollm2; model.path.", show_default=False),
]
Keep = Annotated[
    str | None,
    typer.Option(
        "--keep",
        metavar="all|successful|best",
        help="Episodes to train on: all, the successful ones, or the best of each task; data.keep.",
        show_default=False,
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at the first line that cannot be used; data.strict.")
]


def sft(
    config: Name = None,
    settings: Words = None,
    data: Data = None,
    model: Model = None,
    keep: Keep = None,
    strict: Strict = False,
    out: Out = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
    plain: Plain = False,
    as_json: AsJson = False,
    env_module: EnvModules = None,
) -> None:
    """Train a model on conversations or recorded episodes (supervised fine-tuning).

    Only the assistant's messages, or the agent's replies, are learned. Lines that cannot be used are skipped
    and counted. Ctrl-C saves the last finished step; --resume continues from the last checkpoint and ends
    with the same weights as an uninterrupted run. The model is written to final/ in the run folder.
    """
    config, words = name_and_words(config, settings)
    with needs_extra("Training", "train"):
        from rollgym.trainer.sft.main import run_sft
        from rollgym.trainer.sft.run import option_words
    words = [*option_words(data or (), model), *words]
    words += [] if keep is None else [f"data.keep={keep}"]
    words += ["data.strict=true"] if strict else []
    modules = import_modules(env_module)
    result = run_sft(config, words, out, resume=resume, trust_code=trust_code, plain=plain, modules=modules)
    print_json(result) if as_json else _print(result)


def _print(result: dict[str, Any]) -> None:
    screen = console()
    data = result["data"]
    losses = [f"loss {result['loss']:.4f}"] if result["loss"] is not None else []
    if result["validation_loss"] is not None:
        losses.append(f"validation loss {result['validation_loss']:.4f}")
    screen.print(
        f"{result['examples']} examples, {data['learned_tokens']:,} learned tokens; {', '.join(losses)}",
        highlight=False,
    )
    print_evaluations(result)
