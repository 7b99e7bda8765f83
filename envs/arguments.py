"""Checks of the arguments that environments are made with."""

from __future__ import annotations

from collections.abc import Collection

from rollgym.core.errors import UnknownName, UsageError


def check_choice(noun: str, value: object, choices: Collection[str]) -> None:
    """Raise `UnknownName` unless the value is one of the choices."""
    if value not in list(choices):
        raise UnknownName(noun, str(value), choices, f"Choose from: {', '.join(choices)}.")


def check_range(name: str, value: float | None, low: float, high: float | None = None) -> None:
    """Raise `UsageError` unless the value is at least ``low`` and at most ``high``; ``None`` is a default."""
    if value is not None and not (value >= low and (high is None or value <= high)):
        bounds = f"at least {low:,}" if high is None else f"from {low:,} to {high:,}"
        raise UsageError(f"{name} must be {bounds}, not {value}.")
