"""Configs of direct preference optimization shipped with rollgym, by name. Imports no settings."""

from __future__ import annotations

from pathlib import Path

from rollgym.config import loader
from rollgym.core.errors import UnknownName
from rollgym.trainer import config_files
from rollgym.trainer.sft import config_files as sft_files

PACKAGE = "rollgym.trainer.dpo"


def known_configs() -> dict[str, Path]:
    """Return the shipped configs by name."""
    return loader.known_configs(PACKAGE)


def find_config(name: str) -> Path:
    """Return a YAML file by path or by the name of a shipped config."""
    for command, others in (("train", config_files.known_configs()), ("sft", sft_files.known_configs())):
        if name in others and not Path(name).is_file():
            known = known_configs()
            hint = f"It is one of `rollgym {command}`. Configs: {', '.join(known)}."
            raise UnknownName("config of direct preference optimization", name, known, hint)
    return loader.find_config(name, PACKAGE)


def is_dpo(name: str) -> bool:
    """Whether a config is one of `rollgym dpo`: shipped as such, or a file with ``data`` and ``loss``."""
    values = sft_files.top_values(name)
    if values is None:
        return name in known_configs()
    base = values.get(loader.EXTENDS)
    return {"data", "loss"} <= values.keys() or (isinstance(base, str) and base in known_configs())
