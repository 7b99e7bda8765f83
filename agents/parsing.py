"""Parsers that extract an action from a language model's reply.

A parser is a name (``answer``, ``action``, ``boxed``, ``listed``, ``last_line``, ``raw``) or
``regex:PATTERN``. All of them see the reply without its reasoning, read it once from left to right, and take
the last match. Several can be tried in order, as ``answer|listed|last_line``: the first match is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollgym.core.errors import UnknownName, UsageError

Form = Callable[[str, Sequence[str]], str | None]
"""Maps (reply, valid actions where the environment lists them) to the action, or ``None`` without a match."""


class Parser(NamedTuple):
    """Named forms of a reply, in the order in which they are tried."""

    forms: tuple[tuple[str, Form], ...]


class Reading(NamedTuple):
    """The action parsed from a reply."""

    action: str
    form: str | None
    """Name of the form that matched; ``None`` where none did."""


_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE | re.ASCII)
_BOX = re.compile(r"\\boxed ?\{|\\.|[{}]", re.DOTALL)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")


def strip_thinking(text: str) -> str:
    """Return the reply without its ``<think>`` blocks.

    A block that was never closed runs to the end; one that was never opened (some chat templates open it
    in the prompt) starts at the beginning.
    """
    chunks: list[str] = []
    position, inside = 0, False
    for tag in _THINK.finditer(text):
        closes = tag.group(1) == "/"
        if closes and not inside:
            chunks.clear()
        elif not closes and not inside:
            chunks.append(text[position : tag.start()])
        inside, position = not closes, tag.end()
    if not inside:
        chunks.append(text[position:])
    return "".join(chunks).strip()


def make_parser(name: str) -> Parser:
    """Make the parser of a name, of ``regex:PATTERN``, or of several joined by ``|``."""
    return Parser(tuple((form, _form(form)) for form in form_names(name)))


def form_names(parser: str) -> list[str]:
    """Return the forms that a parser tries, in order. A regex must be the last one: it may contain ``|``."""
    before, regex, pattern = parser.partition("regex:")
    if regex and (not before or before.endswith("|")):
        return [*before.split("|")[:-1], regex + pattern]
    return parser.split("|")


def _form(name: str) -> Form:
    kind, _, pattern = name.partition(":")
    if kind == "regex" and pattern:
        return _regex(pattern)
    if name not in PARSERS:
        raise UnknownName("parser", name, PARSERS, f"Parsers: {', '.join(PARSERS)}, regex:PATTERN.")
    return PARSERS[name]


def take_action(parser: Parser, reply: str, actions: Sequence[str] = ()) -> tuple[str, bool]:
    """Return the action in a reply, and whether the reply matched a form."""
    reading = read_action(parser, reply, actions)
    return reading.action, reading.form is not None


def read_action(parser: Parser, reply: str, actions: Sequence[str] = ()) -> Reading:
    """Return the action in a reply, and the form that matched.

    Without a match, the whole reply without its reasoning is the action, and the environment judges it.
    """
    text = strip_thinking(reply)
    for name, form in parser.forms:
        action = form(text, actions)
        if action is not None:
            return Reading(action.strip(), name)
    return Reading(text, None)


def has_thinking(text: str) -> bool:
    """Return whether a reply has a ``<think>`` tag."""
    return _THINK.search(text) is not None


def _tagged(name: str) -> Form:
    tags = re.compile(rf"<(/?){name}>", re.IGNORECASE | re.ASCII)

    def parse(text: str, actions: Sequence[str]) -> str | None:
        content: str | None = None
        start: int | None = None
        for tag in tags.finditer(text):
            if not tag.group(1):
                start = tag.end()
            elif start is not None:
                content, start = text[start : tag.start()], None
        if content is None and start is not None:
            # A stop string or the token limit can cut off the closing tag.
            content = text[start:].strip() or None
        return content

    return parse


def _boxed(text: str, actions: Sequence[str]) -> str | None:
    content: str | None = None
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
                content = text[start : token.start()]
    if content is None:
        return None
    wrapped = _TEXT.fullmatch(content.strip())
    return wrapped.group(1) if wrapped else content


def _listed(text: str, actions: Sequence[str]) -> str | None:
    """Return the last valid action that occurs in the reply as a separate word, ignoring case."""
    if not actions:
        return None
    # Longest first, so that "move 10" is not read as "move 1".
    longest = sorted(actions, key=len, reverse=True)
    pattern = "|".join(re.escape(action) for action in longest)
    matches = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", text, re.IGNORECASE)
    if not matches:
        return None
    return next((action for action in actions if action == matches[-1]), None) or next(
        action for action in actions if action.lower() == matches[-1].lower()
    )


def _last_line(text: str, actions: Sequence[str]) -> str | None:
    lines = [line for line in text.split("\n") if line.strip()]
    return lines[-1] if lines else None


def _raw(text: str, actions: Sequence[str]) -> str | None:
    return text or None


def _regex(pattern: str) -> Form:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"parser: {pattern!r} is not a regular expression ({error}).") from None

    def parse(text: str, actions: Sequence[str]) -> str | None:
        matches = [match.group(1 if compiled.groups else 0) for match in compiled.finditer(text)]
        values = [match for match in matches if match is not None]
        return values[-1] if values else None

    return parse


PARSERS: dict[str, Form] = {
    "answer": _tagged("answer"),
    "action": _tagged("action"),
    "boxed": _boxed,
    "listed": _listed,
    "last_line": _last_line,
    "raw": _raw,
}
"""All named parsers."""
