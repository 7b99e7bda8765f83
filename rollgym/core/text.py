"""Text helpers for messages and tables."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def shorten(text: str, limit: int, *, middle: bool = False) -> str:
    """Cut a text to at most ``limit`` characters, with an ellipsis at the end or in the middle.

    Example:
        >>> shorten("abcdefgh", 5), shorten("abcdefgh", 5, middle=True)
        ('abcd…', 'ab…gh')
    """
    if len(text) <= limit:
        return text
    if not middle:
        return f"{text[: limit - 1]}…"
    tail = (limit - 1) // 2
    return f"{text[: limit - 1 - tail]}…{text[-tail:]}"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number for a table; ``None`` is a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def interval(low_high: Sequence[float] | None, digits: int = 3) -> str:
    """Format an interval for a table; ``None`` is empty."""
    return "" if low_high is None else f"[{low_high[0]:.{digits}f}, {low_high[1]:.{digits}f}]"


def normalize_answer(text: str) -> str:
    """A text for comparison: without case, repeated white space, and a full stop at the end.

    Example:
        >>> normalize_answer(" New  York. ")
        'new york'
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(".")
