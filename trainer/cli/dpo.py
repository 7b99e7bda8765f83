"""``rollgym dpo``: direct preference optimization."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rollgym.trainer.cli.options import complete_dpo_config, config_argument, name_and_words
from rollgym.trainer.cli.sft import Model, Strict
from rollgym.trainer.cli.train import Out, Plain, Resume, TrustCode, print_evaluations
from rollgym.utils.cli_options import AsJson, EnvModules, console, import_modules, needs_extra
from rollgym.utils.cli_output import print_json

EPILOG = "Example: rollgym dpo --data pairs.jsonl --model smollm2 --out runs/pairs loss.beta=0.05"

Name = Annotated[str | None, config_argument(complete_dpo_config)]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings to override, such as loss.beta=0.05 (`rollgym config explain --dpo`).",
        show_default=False,
    ),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="File of pairs (JSONL, Parquet) or episodes, or a run folder (repeatable); data.files.",
        show_default=False,
    ),
]
Pairs = Annotated[
    str | None,
    typer.Option(
        "--pairs",
        metavar="success|return",
        help="Pair episodes of a task by success, or by return; data.pairs.",
        show_default=False,
    ),
]


def dpo(
    config: Name = None,
    settings: Words = None,
    data: Data = None,
    model: Model = None,
    pairs: Pairs = None,
    strict: Strict = False,
    out: Out = None,
    resume: Resume = False,
    trust_code: TrustCode = False,
    plain: Plain = False,
    as_json: AsJson = False,
    env_module: EnvModules = None,
) -> None:
    """Train a model on preference pairs (direct preference optimization).

    Pairs are lines with prompt, chosen and rejected, or are built from recorded episodes of the same task.
    The model before training is the reference. Lines that cannot be used are skipped and counted. Ctrl-C
    saves the last finished step; --resume continues from the last checkpoint and ends with the same weights
    as an uninterrupted run. The model is written to final/ in the run folder.
    """
    config, words = name_and_words(config, settings)
    with needs_extra("Training", "train"):
        from rollgym.trainer.dpo.main import run_dpo
        from rollgym.trainer.sft.run import option_words
    words = [*option_words(data or (), model), *words]
    words += [] if pairs is None else [f"data.pairs={pairs}"]
    words += ["data.strict=true"] if strict else []
    modules = import_modules(env_module)
    result = run_dpo(config, words, out, resume=resume, trust_code=trust_code, plain=plain, modules=modules)
    print_json(result) if as_json else _print(result)


def _print(result: dict[str, Any]) -> None:
    shown = {
        "loss": "loss {:.4f}",
        "preference_accuracy": "accuracy {:.2f}",
        "reward_margin": "margin {:.3f}",
        "validation_loss": "validation loss {:.4f}",
        "validation_preference_accuracy": "validation accuracy {:.2f}",
    }
    numbers = [text.format(result[name]) for name, text in shown.items() if result[name] is not None]
    console().print(", ".join([f"{result['examples']} pairs", *numbers]), highlight=False)
    print_evaluations(result)
