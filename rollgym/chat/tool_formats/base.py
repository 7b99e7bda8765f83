"""The parts of a reply with tool calls, and how a format reads and writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollgym.core.messages import ToolCall, ToolSpec

__all__ = ["MalformedCall", "ParsedReply", "ToolFormat"]

_EXAMPLE = ToolCall(name="NAME", arguments={"ARGUMENT": "VALUE"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """A reply by its parts."""

    content: str = ""
    """The text for the reader, without reasoning and calls."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    rest: str = ""
    """The text after the reasoning, with the calls."""
    error: str = ""
    """The problem with a malformed call, as a sentence; then there are no calls. Empty without one."""
    in_parts: bool = False
    """True where the text is not all content: it has calls, or reasoning, perhaps an empty one."""


class MalformedCall(ValueError):
    """Text that was meant as a call and is not one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model family writes tool calls."""

    name: str
    read: Callable[[str], tuple[str, list[ToolCall]]]
    """Returns the text outside the calls, and the calls; raises `ValueError` for a malformed one."""
    write: Callable[[Sequence[ToolCall]], str]
    """Returns calls as the text of a reply, where the chat template does not write them."""
    split: Callable[[str, bool], tuple[str, str]]
    """Returns the reasoning and the rest; the flag says whether the prompt has opened reasoning."""
    call_start: Callable[[str], int]
    """Returns how much of an unfinished text is certain to stay outside the calls."""
    opens: str
    """Text with which a reply commits itself to a call."""
    stops: tuple[str, ...] = ()
    """Tokens that end a call, besides the template's own."""
    channels: bool = False
    """True where a reply consists of channels, so that its text cannot be the content of a message."""

    def parse(self, text: str, *, opened: bool = True) -> ParsedReply:
        """Return the parts of a reply, given with its special tokens.

        Args:
            text: The reply.
            opened: Whether the prompt may have opened reasoning, so that the opening tag is missing.
        """
        reasoning, rest = self.split(text, opened)
        thought = self.channels or rest is not text
        try:
            content, calls = self.read(rest)
        except (ValueError, RecursionError) as error:
            reason = str(error) if isinstance(error, MalformedCall) else "it is not valid JSON"
            return ParsedReply(
                content=rest.strip(),
                reasoning=reasoning,
                rest=rest,
                in_parts=thought,
                error=f"The tool call is malformed: {reason}. Expected: {self.write([_EXAMPLE])}",
            )
        return ParsedReply(
            content=content.strip(),
            reasoning=reasoning,
            calls=tuple(calls),
            rest=rest,
            in_parts=thought or bool(calls),
        )

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        """Return the tools and the form of a call, for the prompt of a template without tools."""
        lines = "\n".join(json.dumps(spec.to_openai()["function"], ensure_ascii=False) for spec in tools)
        return (
            f"You can call tools. Each line is a tool and the JSON schema of its arguments:\n{lines}\n\n"
            f"To call a tool, answer in this form:\n{self.write([_EXAMPLE])}\n"
            "The result is in the next message."
        )
