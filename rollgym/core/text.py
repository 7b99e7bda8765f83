"""Text helpers for messages."""

from __future__ import annotations

__all__ = ["shorten"]


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
