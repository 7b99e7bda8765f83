"""Prompt templates, format instructions and history, shared by the ``chat`` and ``lm`` agents.

A template is text with two marks: ``{instructions}`` for the environment's instructions, and ``{format}`` for
the sentence that asks for the form that the parser reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollgym.agents.parsing import form_names
from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.messages import Message

TEMPLATES = {
    "plain": "{instructions}\n\n{format}",
    "reason": (
        "{instructions}\n\n"
        "Before each action, think step by step about what you see and what the action will do. {format}"
    ),
}
"""All named templates."""

_TAG_ASK = (
    "Give your action between <{tag}> and </{tag}>. "
    "For example, to play x, end your reply with <{tag}>x</{tag}>."
)
ASKS = {
    "answer": _TAG_ASK.format(tag="answer"),
    "action": _TAG_ASK.format(tag="action"),
    "boxed": "Give your action in \\boxed{}. For example, to play x, end your reply with \\boxed{x}.",
    "listed": "Reply with one of the actions you are given, and nothing else.",
    "last_line": "Put your action, and nothing else, on the last line of your reply.",
    "raw": "Reply with your action only, and nothing else.",
}
"""Format instruction of each parser. A ``regex:`` parser has none: the template must state the format."""

FORMS = {
    "raw": "{}",
    "listed": "{}",
    "last_line": "{}",
    "answer": "<answer>{}</answer>",
    "action": "<action>{}</action>",
    "boxed": "\\boxed{{{}}}",
}
"""Format string of each parser: an action as a reply."""

MOST_LISTED = 12
"""A reminder lists the valid actions up to this number."""
_MARK = re.compile(r"\{(instructions|format)\}")
_LAST = re.compile(r"last:([0-9]{1,9})")

ChatMessage = dict[str, Any]
"""A message in the form of OpenAI's chat completions."""


class Exchange(NamedTuple):
    """One earlier turn, as it is shown in the prompt."""

    observation: str
    reply: str


def load_template(name: str) -> str:
    """Return a template by its name, or from a text file."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        hint = f"Give {' or '.join(TEMPLATES)}, or the path of a text file."
        raise UnknownName("template", name, TEMPLATES, hint) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"The template {name} cannot be read: {reason}.") from None
    if "{instructions}" not in text:
        raise UsageError(
            f"The template {name} has no {{instructions}} mark, so the model would not see the rules."
        )
    return text.strip()


TOOL_CALL = "tool_call"
"""Name of the form of replies that call tools, beside those of parsers."""
ASK_FOR_CALLS = "Act by calling the tools that you are given."
"""Format instruction where the environment has tools."""
ASK_FOR_MESSAGE = "Reply with your message only, and nothing else."
"""Format instruction of the parser ``raw`` in a role that writes free text."""


def fill_template(
    template: str, instructions: str, parser: str, *, tools: bool = False, free_text: bool = False
) -> str:
    """Return the first message: the template with the instructions and the format filled in."""
    wanted = ASK_FOR_CALLS if tools else ASK_FOR_MESSAGE if free_text and parser == "raw" else ask(parser)
    values = {"instructions": instructions.strip(), "format": wanted}
    return _MARK.sub(lambda mark: values[mark.group(1)], template).strip()


def ask(parser: str) -> str:
    """Return the format instruction of the first form that a parser tries."""
    return ASKS.get(form_names(parser)[0], "")


def listed_actions(info: Mapping[str, Any]) -> list[str]:
    """Return the valid actions, where the environment lists them."""
    actions = info.get("actions")
    return [action for action in actions if isinstance(action, str)] if isinstance(actions, list) else []


def read_results(info: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the messages with which an environment answers tool calls; none where it has none."""
    messages = info.get("messages")
    if not isinstance(messages, list):
        return ()
    try:
        return tuple(Message.from_openai(message) for message in messages)
    except (ValueError, TypeError, AttributeError):
        return ()  # another environment's use of the same key


def remind(parser: str, actions: Sequence[str]) -> str:
    """Return the end of an observation: the valid actions, if few, and the format of a reply."""
    listed = f"Actions: {', '.join(actions)}. " if 0 < len(actions) <= MOST_LISTED else ""
    text = f"{listed}{ask(parser)}".strip()
    return f"\n\n{text}" if text else ""


def format_example_turns(parser: str, actions: Sequence[str], count: int) -> list[Exchange]:
    """Return made-up turns in which a valid action is requested and played, to show the reply format."""
    form = FORMS.get(form_names(parser)[0], "{}")
    return [Exchange(f"This is practice. Play {action}.", form.format(action)) for action in actions[:count]]


def history_limit(policy: str) -> int | None:
    """Return how many earlier turns a history option keeps; ``None`` for all of them."""
    if policy == "full":
        return None
    if policy == "none":
        return 0
    match = _LAST.fullmatch(policy)
    if not match:
        raise UsageError(f"history must be full, none or last:N (such as last:5), not {policy!r}.")
    return int(match.group(1))
