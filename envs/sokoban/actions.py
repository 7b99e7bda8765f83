"""Actions by name or by gym-sokoban's number, one or several in a turn."""

from __future__ import annotations

import re

from rollgym.core.messages import ToolCall
from rollgym.envs.sokoban.game import NOOP

NAMES = ("Up", "Down", "Left", "Right")
SEPARATOR = " || "

_DIRECTIONS = tuple(name.lower() for name in NAMES)
_SEPARATORS = re.compile(r"\|\||,")
_WRAPPING = " \t\r\n`'\""

_CODES: dict[str, int] = {"noop": NOOP, "no-op": NOOP, "no operation": NOOP}
_CODES |= {str(code): code for code in range(9)}
for _code, _name in enumerate(NAMES, 1):
    _CODES[_name.lower()] = _CODES[f"push {_name.lower()}"] = _code
    _CODES[f"move {_name.lower()}"] = _code + 4


def parse_actions(text: str, limit: int) -> tuple[list[int] | None, int]:
    """The codes of the first ``limit`` actions named, and how many more there were.

    ``None`` if one of them is not an action or none is given.
    """
    parts = [part.strip(_WRAPPING) for part in _SEPARATORS.split(text.strip(_WRAPPING))]
    names = [" ".join(part.lower().split()) for part in parts if part]
    codes = [_CODES.get(name) for name in names[:limit]]
    valid = [code for code in codes if code is not None]
    if not valid or len(valid) < len(codes):
        return None, 0
    return valid, len(names) - len(valid)


def move_calls(text: str) -> list[ToolCall]:
    """Return actions by name, such as ``Right || Up``, as calls of the tool form."""
    names = [part.strip().lower() for part in _SEPARATORS.split(text)]
    # The tool form has no other action than a move, so waiting is a move as well.
    directions = [name if name in _DIRECTIONS else "up" for name in names]
    return [ToolCall(name="move", arguments={"direction": direction}) for direction in directions]
