"""Options shared by the trainer's commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def complete_config(incomplete: str) -> list[str]:
    """Shell completion: names of shipped configs that start with ``incomplete``."""
    from rollgym.trainer.config_files import known_configs

    return [name for name in known_configs() if name.startswith(incomplete)]


def complete_sft_config(incomplete: str) -> list[str]:
    """Shell completion: names of shipped configs of `rollgym sft` that start with ``incomplete``."""
    from rollgym.trainer.sft.config_files import known_configs

    return [name for name in known_configs() if name.startswith(incomplete)]


def complete_dpo_config(incomplete: str) -> list[str]:
    """Shell completion: names of shipped configs of `rollgym dpo` that start with ``incomplete``."""
    from rollgym.trainer.dpo.config_files import known_configs

    return [name for name in known_configs() if name.startswith(incomplete)]


def complete_any_config(incomplete: str) -> list[str]:
    """Shell completion: names of all shipped configs that start with ``incomplete``."""
    parts = (complete_config, complete_sft_config, complete_dpo_config)
    return [name for complete in parts for name in complete(incomplete)]


def config_argument(complete: Callable[[str], list[str]]) -> Any:
    """The argument that names a config, with its shell completion."""
    return typer.Argument(
        metavar="CONFIG",
        help="A YAML file, or the name of a shipped config (`rollgym config list`).",
        show_default=False,
        autocompletion=complete,
    )


Name = Annotated[str | None, config_argument(complete_config)]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings to override, such as stop.steps=20 (`rollgym config explain`).",
        show_default=False,
    ),
]


def name_and_words(config: str | None, settings: list[str] | None) -> tuple[str | None, list[str]]:
    """The config and the overrides; the first argument may already be an override."""
    words = list(settings or [])
    if config is not None and "=" in config and not Path(config).exists():
        return None, [config, *words]
    return config, words
