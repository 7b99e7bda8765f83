"""The two actions, ``search[words]`` and ``click[name]``, read from what an agent wrote."""

from __future__ import annotations

import re
from typing import NamedTuple

from rollgym.envs.webshop.rules import Rules
from rollgym.text import bare

SEARCH, CLICK = "search", "click"

_STRICT = re.compile(r"(.+)\[(.+)\]")
"""The original's: greedy, lines apart, and anything after the last bracket of the first line is ignored."""
_LENIENT = re.compile(r"(search|click)\s*\[(.*)\]", re.IGNORECASE | re.DOTALL)


class Action(NamedTuple):
    """One action: ``search`` or ``click``, and what is in its brackets, lower case."""

    name: str
    argument: str

    def __str__(self) -> str:
        return f"{self.name}[{self.argument}]"


def parse(text: str, rules: Rules) -> Action | None:
    """The action that a text is, or None where it is none."""
    match = _STRICT.match(text) if rules.strict_grammar else _LENIENT.fullmatch(bare(text))
    if match is None:
        return None
    name, argument = match.groups()
    if rules.strict_grammar:
        return Action(name, argument.lower()) if name in (SEARCH, CLICK) else None
    argument = " ".join(argument.lower().split())
    return Action(name.lower(), argument) if argument else None
