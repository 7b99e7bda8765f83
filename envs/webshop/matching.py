"""Finds option values in an instruction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def matching_values(options: Mapping[str, Sequence[str]], instruction: str) -> dict[str, str]:
    """Return the value of each option that an instruction names: as ``size: large``, or else anywhere.

    The longest match counts, since ``large`` also matches ``x-large``.
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
    """Return whether a text contains a phrase as whole words."""
    phrase = " ".join(phrase.lower().split())
    return bool(phrase) and re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text) is not None
