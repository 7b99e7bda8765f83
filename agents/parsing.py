"""Taking an action out of a language model's reply.

A parser is named (``answer``, ``action``, ``boxed``, ``last_line``, ``raw``) or given as ``regex:PATTERN``.
All of them see the reply without its thinking, read it once from left to right, and prefer the last match.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rollgym.errors import UnknownName, UsageError

Parser = Callable[[str], str | None]
"""The action in a reply, or ``None`` where the reply does not have the form asked for."""

_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE | re.ASCII)
_BOX = re.compile(r"\\boxed ?\{|\\.|[{}]", re.DOTALL)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")


def strip_thinking(text: str) -> str:
    """The reply without its ``<think>`` blocks.

    A block that was never closed runs to the end; one that was never opened (some chat templates open it
    in the prompt) starts at the beginning.
    """
    kept: list[str] = []
    position, inside = 0, False
    for tag in _THINK.finditer(text):
        closes = tag.group(1) == "/"
        if closes and not inside:
            kept.clear()
        elif not closes and not inside:
            kept.append(text[position : tag.start()])
        inside, position = not closes, tag.end()
    if not inside:
        kept.append(text[position:])
    return "".join(kept).strip()


def make_parser(name: str) -> Parser:
    """The parser of that name, or of a pattern given as ``regex:PATTERN``."""
    kind, _, pattern = name.partition(":")
    if kind == "regex" and pattern:
        return _regex(pattern)
    if name not in PARSERS:
        raise UnknownName("parser", name, PARSERS, f"Parsers: {', '.join(PARSERS)}, regex:PATTERN.")
    return PARSERS[name]


def take_action(parser: Parser, reply: str) -> tuple[str, bool]:
    """The action in a reply, and whether the reply had the form asked for.

    Where it had not, the whole reply without its thinking is the action; the environment says what it
    makes of it.
    """
    text = strip_thinking(reply)
    found = parser(text)
    return (text, False) if found is None else (found.strip(), True)


def _tagged(name: str) -> Parser:
    tags = re.compile(rf"<(/?){name}>", re.IGNORECASE | re.ASCII)

    def parse(text: str) -> str | None:
        found: str | None = None
        start: int | None = None
        for tag in tags.finditer(text):
            if not tag.group(1):
                start = tag.end()
            elif start is not None:
                found, start = text[start : tag.start()], None
        if found is None and start is not None:
            # A stop sequence or the token limit can take the closing tag away.
            found = text[start:].strip() or None
        return found

    return parse


def _boxed(text: str) -> str | None:
    found: str | None = None
    stack: list[int | None] = []
    for token in _BOX.finditer(text):
        mark = token.group()
        if mark.startswith("\\boxed"):
            stack.append(token.end())
        elif mark == "{":
            stack.append(None)
        elif mark == "}" and stack:
            start = stack.pop()
            if start is not None:
                found = text[start : token.start()]
    if found is None:
        return None
    plain = _TEXT.fullmatch(found.strip())
    return plain.group(1) if plain else found


def _last_line(text: str) -> str | None:
    lines = [line for line in text.split("\n") if line.strip()]
    return lines[-1] if lines else None


def _raw(text: str) -> str | None:
    return text or None


def _regex(pattern: str) -> Parser:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"parser: {pattern!r} is not a regular expression ({error}).") from None

    def parse(text: str) -> str | None:
        matches = [match.group(1 if compiled.groups else 0) for match in compiled.finditer(text)]
        kept = [match for match in matches if match is not None]
        return kept[-1] if kept else None

    return parse


PARSERS: dict[str, Parser] = {
    "answer": _tagged("answer"),
    "action": _tagged("action"),
    "boxed": _boxed,
    "last_line": _last_line,
    "raw": _raw,
}
"""All parsers that have a name."""
