"""Finding the values of options in what a customer says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def matching_values(options: Mapping[str, Sequence[str]], instruction: str) -> dict[str, str]:
    """For each option the value that an instruction names: said as ``size: large``, or else in any place.

    The longest counts, as ``large`` is found within ``x-large`` too.
    """
    text = " ".join(instruction.lower().split())
    chosen = {}
    for name, values in options.items():
        named = [value for value in values if _has(text, f"{name}: {value}")]
        named = named or [value for value in values if _has(text, value)]
        if named:
            chosen[name] = max(named, key=len)
    return chosen


def _has(text: str, phrase: str) -> bool:
    """Whether a phrase stands in a text, not as a part of other words."""
    phrase = " ".join(phrase.lower().split())
    return bool(phrase) and re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text) is not None
