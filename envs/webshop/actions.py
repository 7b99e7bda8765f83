"""The two actions, ``search[words]`` and ``click[name]``, parsed from an agent's text."""

from __future__ import annotations

import re
from typing import NamedTuple

from rollgym.core.env import bare
from rollgym.core.messages import ToolCall
from rollgym.envs.webshop.rules import Rules

SEARCH, CLICK = "search", "click"

_LENIENT = re.compile(r"(search|click)\s*\[(.*)\]", re.IGNORECASE | re.DOTALL)


class Action(NamedTuple):
    """One action: ``search`` or ``click``, and its argument, lower case."""

    name: str
    argument: str

    def __str__(self) -> str:
        return f"{self.name}[{self.argument}]"


def parse(text: str, rules: Rules) -> Action | None:
    """Parse an action; None if the text is not an action."""
    if rules.strict_grammar:
        name, argument = _strict(text)
        return Action(name, argument.lower()) if name in (SEARCH, CLICK) else None
    match = _LENIENT.fullmatch(bare(text))
    if match is None:
        return None
    name, argument = match.groups()
    argument = " ".join(argument.lower().split())
    return Action(name.lower(), argument) if argument else None


def _strict(text: str) -> tuple[str, str]:
    r"""Name and argument as the original's pattern ``(.+)\[(.+)\]`` finds them; empty where it does not.

    It is greedy, reads the first line only, and ignores text after its last bracket. The pattern itself takes
    quadratic time.
    """
    line = text.partition("\n")[0]
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 0))
    return (line[:start], line[start + 1 : end]) if start > 0 else ("", "")


def action_calls(text: str) -> list[ToolCall]:
    """Return an action as a call of the tool form."""
    match = _LENIENT.fullmatch(bare(text))
    if match is None:
        return []
    key = "words" if match[1].lower() == SEARCH else "name"
    return [ToolCall(name=match[1].lower(), arguments={key: match[2]})]
