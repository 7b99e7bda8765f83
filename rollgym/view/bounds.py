"""Size limits of values on the page."""

from __future__ import annotations

from typing import Any

TEXT = 200_000
"""Maximum characters of a text; the page states how many are omitted."""
ITEMS = 2_000
"""Maximum entries of a list or object in an ``info``."""
DEPTH = 40
"""Maximum nesting depth of lists and objects."""


def bounded(value: Any, depth: int = 0) -> Any:
    """Return the value with long texts and lists cut and nesting limited."""
    if isinstance(value, str):
        return bounded_text(value)
    if isinstance(value, (dict, list, tuple)) and depth >= DEPTH:
        return "… nested too deeply"
    if isinstance(value, dict):
        kept = {str(key)[:TEXT]: bounded(value[key], depth + 1) for key in list(value)[:ITEMS]}
        return kept | ({"…": f"{len(value) - ITEMS} more"} if len(value) > ITEMS else {})
    if isinstance(value, (list, tuple)):
        rest = [f"… {len(value) - ITEMS} more"] if len(value) > ITEMS else []
        return [bounded(one, depth + 1) for one in value[:ITEMS]] + rest
    return value


def bounded_text(value: Any) -> Any:
    """Return a text cut to the limit; any other value unchanged."""
    if not isinstance(value, str) or len(value) <= TEXT:
        return value
    return f"{value[:TEXT]}\n… {len(value) - TEXT:,} more characters are in the run's folder only."
