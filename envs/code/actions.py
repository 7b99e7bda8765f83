"""Parsing of actions: code blocks and the word that ends the episode."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollgym.core.env import bare
from rollgym.core.messages import ToolCall

# Possessive match: backtracking would be quadratic in the length of a line.
_FENCE = re.compile(r"^[ \t]*+```[ \t]*+([\w+.-]*+)[ \t]*+$", re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """A parsed action."""

    blocks: tuple[str, ...]
    """Its fenced blocks."""
    text: str
    """Text outside the blocks."""


def parse_action(action: str) -> ParsedAction:
    """The fenced blocks of an action, and the rest. A last block may lack its closing fence."""
    blocks, outside = [], []
    position, block_start = 0, None
    for fence in _FENCE.finditer(action):
        if block_start is None:
            if fence[1].lower() not in _PYTHON:
                continue
            outside.append(action[position : fence.start()])
            block_start = fence.end()
        elif not fence[1]:
            blocks.append(action[block_start : fence.start()])
            block_start, position = None, fence.end()
    if block_start is not None:
        blocks.append(action[block_start:])
    else:
        outside.append(action[position:])
    return ParsedAction(tuple(block.strip("\r\n") + "\n" for block in blocks), "\n".join(outside))


def submits(parsed: ParsedAction) -> bool:
    """Whether a line outside the blocks is the word ``submit``."""
    return any(bare(line).lower() == "submit" for line in parsed.text.splitlines())


def action_calls(action: str) -> list[ToolCall]:
    """Return a block of code, ``submit``, or both, as calls of the tool form."""
    parsed = parse_action(action)
    calls = [ToolCall(name="run_python", arguments={"code": block}) for block in parsed.blocks]
    return [*calls, ToolCall(name="submit")] if submits(parsed) else calls


def defines(code: str, name: str) -> bool:
    """Whether a block defines the name at its top level, found without running or parsing it."""
    word = re.escape(name)
    return bool(
        re.search(
            rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{word}\b|^{word}[ \t]*(?::[^=\n]*)?=", code, re.MULTILINE
        )
    )


_ANSWER = re.compile(r"^\W*(?:final\s+)?answer\W*?[:=]\s*(.+)$", re.IGNORECASE)


def parse_answer(parsed: ParsedAction) -> str | None:
    """Return X of the last line ``answer: X`` outside the blocks."""
    answers = [match[1] for line in parsed.text.splitlines() if (match := _ANSWER.match(line.strip()))]
    return bare(answers[-1]).strip("* ") if answers else None
