"""Training configs shipped with rollgym, by name."""

from __future__ import annotations

from pathlib import Path

from rollgym.config import loader

PACKAGE = "rollgym.trainer"


def known_configs() -> dict[str, Path]:
    """Return the shipped training configs by name."""
    return loader.known_configs(PACKAGE)


def find_config(name: str) -> Path:
    """Return a YAML file by path or by the name of a shipped config."""
    return loader.find_config(name, PACKAGE)
