r"""Reads the final answer out of a reply to a question.

The rules, in this order; the first one that applies decides:

1. ``\boxed{...}``: the content of the box.
2. A line that starts with ``Answer:``: the rest of that line.
3. The last line, if it is a bare answer (the caller says what that is).

The answer must be given once. A reply with two boxes, two ``Answer:`` lines, a box and an ``Answer:`` line
that differ, or bare answers on other lines than the last has no answer: a list of guesses earns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_BOX = re.compile(r"\\boxed ?\{|\\.|[{}]", re.DOTALL)
_ANSWER = re.compile(r"[ \t]*[*_#> ]{0,8}(?:final )?answer[*_ ]{0,8}[:=](.*)", re.IGNORECASE)
_EDGES = " \t\r\n`'\"*_"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer in a reply, and where it was found."""

    text: str
    found: str
    """``boxed``, ``answer line`` or ``last line``; ``nothing`` or ``several`` where there is no answer."""

    @property
    def given(self) -> bool:
        """Whether there is one answer."""
        return self.found not in ("nothing", "several")


def read_answer(reply: str, is_answer: Callable[[str], bool]) -> Answer:
    r"""Return the answer in a reply; ``is_answer`` tells whether a line is a bare answer.

    Example:
        >>> read_answer("3 + 4 = 7\nAnswer: 7", str.isdigit)
        Answer(text='7', found='answer line')
    """
    lines = [line for line in reply.splitlines() if line.strip()]
    boxed = [trim(text) for text in boxes(reply)]
    stated = [trim(match[1]) for line in lines if (match := _ANSWER.match(line))]
    outside = [text for text in stated if not boxes(text)]
    if len(boxed) > 1 or len(stated) > 1 or (boxed and outside and boxed != outside):
        return Answer("", "several")
    for texts, found in ((boxed, "boxed"), (stated, "answer line")):
        if texts:
            return Answer(texts[0], found) if texts[0] else Answer("", "nothing")
    bare = [trim(line) for line in lines if is_answer(trim(line))]
    if not lines or not is_answer(trim(lines[-1])):
        return Answer("", "nothing")
    return Answer(bare[0], "last line") if len(bare) == 1 else Answer("", "several")


def trim(text: str) -> str:
    """Strip white space, quotes, backticks and emphasis around a text, and a full stop after it."""
    return text.strip(_EDGES).rstrip(_EDGES + ".")


def boxes(reply: str) -> list[str]:
    r"""The contents of all ``\boxed{...}``, read once from left to right; an open box has none."""
    contents: list[str] = []
    depth, start = 0, -1
    for mark in _BOX.finditer(reply):
        token = mark[0]
        if start < 0:
            if token.startswith("\\boxed"):
                start, depth = mark.end(), 1
        elif token == "{" or token.startswith("\\boxed"):
            depth += 1
        elif token == "}":
            depth -= 1
            if not depth:
                contents.append(reply[start : mark.start()])
                start = -1
    return contents
