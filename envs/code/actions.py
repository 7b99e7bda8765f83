"""Parsing of actions: code blocks and the word that ends the episode."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollgym.core.env import bare

# Possessive match: backtracking would be quadratic in the length of a line.
_FENCE = re.compile(r"^[ \t]*+```[ \t]*+([\w+.-]*+)[ \t]*+$", re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")


@dataclass(frozen=True, slots=True)
class Said:
    """A parsed action."""

    blocks: tuple[str, ...]
    """Its fenced blocks."""
    rest: str
    """Text outside the blocks."""


def taken_apart(action: str) -> Said:
    """The fenced blocks of an action, and the rest. A last block may lack its closing fence."""
    blocks, rest = [], []
    at, opened = 0, None
    for fence in _FENCE.finditer(action):
        if opened is None:
            if fence[1].lower() not in _PYTHON:
                continue
            rest.append(action[at : fence.start()])
            opened = fence.end()
        elif not fence[1]:
            blocks.append(action[opened : fence.start()])
            opened, at = None, fence.end()
    if opened is not None:
        blocks.append(action[opened:])
    else:
        rest.append(action[at:])
    return Said(tuple(block.strip("\r\n") + "\n" for block in blocks), "\n".join(rest))


def submits(said: Said) -> bool:
    """Whether a line outside the blocks is the word ``submit``."""
    return any(bare(line).lower() == "submit" for line in said.rest.splitlines())


def defines(code: str, name: str) -> bool:
    """Whether a block defines the name at its top level, found without running or parsing it."""
    word = re.escape(name)
    return bool(
        re.search(
            rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{word}\b|^{word}[ \t]*(?::[^=\n]*)?=", code, re.MULTILINE
        )
    )


_ANSWER = re.compile(r"^\W*(?:final\s+)?answer\W*?[:=]\s*(.+)$", re.IGNORECASE)


def answered(said: Said) -> str | None:
    """Return X of the last line ``answer: X`` outside the blocks."""
    found = [match[1] for line in said.rest.splitlines() if (match := _ANSWER.match(line.strip()))]
    return bare(found[-1]).strip("* ") if found else None
