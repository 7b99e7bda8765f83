"""Configs of supervised fine-tuning shipped with rollgym, by name. Imports no settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollgym.config import loader
from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.files import read_bounded
from rollgym.trainer import config_files

PACKAGE = "rollgym.trainer.sft"


def known_configs() -> dict[str, Path]:
    """Return the shipped configs by name."""
    return loader.known_configs(PACKAGE)


def find_config(name: str) -> Path:
    """Return a YAML file by path or by the name of a shipped config."""
    if name in config_files.known_configs() and not Path(name).is_file():
        known = known_configs()
        hint = f"It is one of `rollgym train`. Configs: {', '.join(known)}."
        raise UnknownName("config of supervised fine-tuning", name, known, hint)
    return loader.find_config(name, PACKAGE)


def is_sft(name: str) -> bool:
    """Whether a config is one of `rollgym sft`: shipped as such, or a file with ``data`` or such a base."""
    values = top_values(name)
    if values is None:
        return name in known_configs()
    base = values.get(loader.EXTENDS)
    return "data" in values or (isinstance(base, str) and base in known_configs())


def top_values(name: str) -> dict[str, Any] | None:
    """The values of a YAML file, without those of its base; ``None`` if there is no such file.

    Those of a broken file are empty: it is reported where it is loaded.
    """
    path = Path(name)
    if not path.is_file():
        return None
    try:
        return loader.parse(read_bounded(path, loader.MAX_BYTES).decode("utf-8", "replace"), name)
    except (OSError, UsageError):
        return {}
