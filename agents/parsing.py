"""Taking an action out of a language model's reply.

A parser is named (``answer``, ``action``, ``boxed``, ``listed``, ``last_line``, ``raw``) or given as
``regex:PATTERN``. All of them see the reply without its thinking, read it once from left to right, and prefer
the last match. Several can be tried in order, ``answer|listed|last_line``: the first that finds something
counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rollgym.errors import UnknownName, UsageError

Form = Callable[[str, Sequence[str]], str | None]
"""The action in a reply, where the second are the valid ones, if few; ``None`` where it has another form."""


class Parser(NamedTuple):
    """Forms of a reply by name, in the order in which they are tried."""

    forms: tuple[tuple[str, Form], ...]


class Reading(NamedTuple):
    """What was found in a reply."""

    action: str
    form: str | None
    """In which form it was; ``None`` where it had none of those asked for."""


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
    """The parser of that name, of a pattern given as ``regex:PATTERN``, or of several of them."""
    return Parser(tuple((form, _form(form)) for form in form_names(name)))


def form_names(parser: str) -> list[str]:
    """The forms that a parser tries, in order. A pattern is the last one: it may hold what separates them."""
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
    """The action in a reply, and whether the reply had a form that was asked for."""
    found = read_action(parser, reply, actions)
    return found.action, found.form is not None


def read_action(parser: Parser, reply: str, actions: Sequence[str] = ()) -> Reading:
    """The action in a reply, and in which form it was.

    Where it had none, the whole reply without its thinking is the action; the environment says what it
    makes of it.
    """
    text = strip_thinking(reply)
    for name, form in parser.forms:
        found = form(text, actions)
        if found is not None:
            return Reading(found.strip(), name)
    return Reading(text, None)


def has_thinking(text: str) -> bool:
    """Whether there is a ``<think>`` tag in a reply."""
    return _THINK.search(text) is not None


def _tagged(name: str) -> Form:
    tags = re.compile(rf"<(/?){name}>", re.IGNORECASE | re.ASCII)

    def parse(text: str, actions: Sequence[str]) -> str | None:
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


def _boxed(text: str, actions: Sequence[str]) -> str | None:
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


def _listed(text: str, actions: Sequence[str]) -> str | None:
    """The last of the valid actions that the reply names as a word of its own, whatever its case."""
    if not actions:
        return None
    # Longest first: of "move 1" and "move 10", the one that is there in full.
    longest = sorted(actions, key=len, reverse=True)
    pattern = "|".join(re.escape(action) for action in longest)
    named = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", text, re.IGNORECASE)
    if not named:
        return None
    return next((action for action in actions if action == named[-1]), None) or next(
        action for action in actions if action.lower() == named[-1].lower()
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
        kept = [match for match in matches if match is not None]
        return kept[-1] if kept else None

    return parse


PARSERS: dict[str, Form] = {
    "answer": _tagged("answer"),
    "action": _tagged("action"),
    "boxed": _boxed,
    "listed": _listed,
    "last_line": _last_line,
    "raw": _raw,
}
"""All parsers that have a name."""
