"""How much of one value the page holds, whatever a file says."""

from __future__ import annotations

from typing import Any

TEXT = 200_000
"""Characters of one text; what is beyond is left out, and said so."""
ITEMS = 2_000
"""Entries of one list or object in an ``info``."""
DEPTH = 40
"""Levels of lists and objects in one another."""


def bounded(value: Any, depth: int = 0) -> Any:
    """The same value with its longest texts and lists cut, and not nested too deeply to be walked."""
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
    """A text of bounded length; anything else as it is."""
    if not isinstance(value, str) or len(value) <= TEXT:
        return value
    return f"{value[:TEXT]}\n… {len(value) - TEXT:,} more characters are in the run's folder only."
