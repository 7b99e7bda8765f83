"""Reasoning at the start of a reply, finished or not, and marks in unfinished text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["before_markers", "opens_reasoning", "split_reasoning", "split_unfinished"]

_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>"))


def split_reasoning(text: str, opened: bool = True) -> tuple[str, str]:
    """Return the reasoning at the start of a reply, and the rest: the text itself if it has no reasoning.

    Reasoning that was cut off has no rest.

    Args:
        text: The reply.
        opened: Whether the prompt may have opened reasoning, so that the opening tag is missing.

    Example:
        >>> split_reasoning("<think>Left is a wall.</think>Up")
        ('Left is a wall.', 'Up')
    """
    for start, end in _REASONING:
        before, closed, rest = text.partition(end)
        head, tag, inside = before.partition(start)
        if closed and (not head.strip() if tag else opened):
            return (inside if tag else before).strip(), rest
        if tag and not closed and not head.strip():
            return inside.strip(), ""
    return "", text


def split_unfinished(text: str, opened: bool) -> tuple[str, str] | None:
    """Return the reasoning so far and the rest of an unfinished reply: the text itself without reasoning.

    ``None`` while it is not certain whether the reply starts with reasoning.
    """
    if opened:
        # Until the end, all of it may turn out to be content.
        start, end = _REASONING[0]
        return split_reasoning(text) if end in text and start not in text.partition(end)[0] else None
    start_of_text = text.lstrip()
    for start, end in _REASONING:
        if start.startswith(start_of_text):
            return None
        if start_of_text.startswith(start):
            inside, closed, rest = start_of_text[len(start) :].partition(end)
            return (inside if closed else inside[: before_markers(inside, (end,))]).strip(), rest
    return "", text


def opens_reasoning(prompt: str) -> bool:
    """Return whether a prompt ends inside reasoning, so that a reply starts without the opening tag."""
    return any(prompt.rfind(start) > prompt.rfind(end) for start, end in _REASONING)


def before_markers(text: str, markers: Sequence[str]) -> int:
    """Return the length of an unfinished text before the first marker, which may be incomplete."""
    places = [place for marker in markers if (place := text.find(marker)) >= 0]
    longest = max((len(marker) for marker in markers), default=0)
    for place in range(max(0, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[place:]) for marker in markers):
            places.append(place)
            break
    return min(places, default=len(text))
