"""Durations as text: ``30s``, ``5m``, ``4h``, ``2d``."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|m|h|d)?", re.ASCII)


def seconds(value: Any) -> Any:
    """Convert ``4h`` to seconds; numbers are seconds, and other values are returned for pydantic to check."""
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ValueError("expected a duration such as 500ms, 30s, 5m, 4h or 2d")
    return float(match[1]) * UNITS[match[2] or ""]


Duration = Annotated[float, BeforeValidator(seconds)]
"""A number of seconds, or a text such as ``4h``."""
OptionalDuration = Annotated[float | None, BeforeValidator(seconds)]


def duration_text(value: float) -> str:
    """Format a duration for people."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.1f} s" if value >= 1 or value == 0 else f"{1000 * value:.3g} ms"
