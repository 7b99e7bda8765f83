"""Checks of the arguments that environments are made with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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


def check_kinds(kinds: Sequence[str] | None, known: Collection[str], level: int | None) -> tuple[str, ...]:
    """The kinds of generated tasks to draw: those that are named, or all known ones of the level.

    Raises:
        UsageError: ``kinds`` is not a list of names, or one of them does not exist at the level.
    """
    if kinds is None:
        return tuple(known)
    if isinstance(kinds, str) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise UsageError(f"kinds must be a list of names, not {kinds!r}. Choose from: {', '.join(known)}.")
    for kind in kinds:
        check_choice("kind" if level is None else f"kind of level {level}", kind, known)
    return tuple(dict.fromkeys(kinds))
