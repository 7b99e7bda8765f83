"""The protocol of dialects: each reads requests of one API and writes its replies, streams and errors.

A dialect knows nothing of sessions and tokens; the core knows nothing of dialects. A stream has the content
of the plain response: text as soon as it is certain, everything else when the reply is complete.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollgym.core.messages import Message
from rollgym.core.types import Usage
from rollgym.serve.requests import ChatRequest

_log = logging.getLogger(__name__)
CHUNK = 24
"""Characters per piece of a stream, where more of the text is there at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply of the model, as a client sees it."""

    message: Message
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    stop: str | None = None
    """The stop string of the request that ended the reply."""
    tokens: tuple[tuple[str, float], ...] = ()
    """Text and log-prob of each token, where the request asks for them."""
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """All replies to one request, and the name under which a client refers to them."""

    id: str
    """Unique; contains the session name."""
    created: int
    """Seconds since the epoch."""
    items: tuple[Reply, ...]

    @property
    def first(self) -> Reply:
        """The first reply: the only one in most dialects."""
        return self.items[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHead:
    """Facts about the replies to a request that are known before their first token."""

    id: str
    """As in `Replies`."""
    created: int
    prompt_tokens: int
    ignored: tuple[str, ...] = ()
    """Fields of the request that have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Further text of an unfinished reply."""

    index: int = 0
    """Place of the reply among all replies to the request."""
    reasoning: str = ""
    text: str = ""


class Sent:
    """The part of one reply that a client has received."""

    def __init__(self) -> None:
        self.reasoning = self.text = ""

    def add(self, delta: Delta) -> None:
        """Note what is sent."""
        self.reasoning += delta.reasoning
        self.text += delta.text

    def rest(self, reply: Reply) -> tuple[str, str]:
        """Return the reasoning and the text of a finished reply that have not been sent."""
        return _after(self.reasoning, reply.message.reasoning), _after(self.text, reply.message.text)


def _after(sent: str, whole: str) -> str:
    if not whole.startswith(sent):
        _log.warning(
            "A streamed reply ended with invalid bytes: the client has received slightly different text."
        )
        return ""
    return whole[len(sent) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectRequest:
    """A request as a dialect has read it: the core's part, and how to respond."""

    chat: ChatRequest
    stream: bool = False
    usage: bool = True
    """Whether a stream ends with the token usage."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that the response repeats."""
    messages: tuple[Message, ...] = ()
    """The messages as sent, which a later request may continue by naming the response."""


History = Callable[[str], Sequence[Message]]
"""Returns the messages up to and including an earlier response, by its id."""


class ReplyStream(Protocol):
    """Writes the events of one response: `start`, any number of `delta`, then `finish` or `fail`."""

    def start(self) -> Iterator[str]:
        """Yield the events before the first text."""

    def delta(self, delta: Delta) -> Iterator[str]:
        """Yield further text. The text of a reply comes after its reasoning."""

    def finish(self, replies: Replies) -> Iterator[str]:
        """Yield what is missing of the finished replies."""

    def fail(self, status: int, message: str, *, code: str | None, param: str | None) -> Iterator[str]:
        """Yield an error that ends the stream."""


class Dialect(Protocol):
    """Reads and writes the bodies of one API."""

    def read(self, body: bytes, history: History) -> DialectRequest:
        """Parse a request; raises `ApiError`."""

    def response(self, request: DialectRequest, replies: Replies) -> dict[str, Any]:
        """Return the body of a plain response."""

    def stream(self, request: DialectRequest, head: StreamHead) -> ReplyStream:
        """Return the writer of a stream."""

    def error(self, status: int, message: str, *, code: str | None, param: str | None) -> dict[str, Any]:
        """Return the body of an error response."""


def sse(value: Mapping[str, Any], event: str | None = None) -> str:
    """Return a server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(value)}\n\n"


def pieces(text: str) -> Iterator[str]:
    """Split a text for a stream."""
    for start in range(0, len(text), CHUNK):
        yield text[start : start + CHUNK]
