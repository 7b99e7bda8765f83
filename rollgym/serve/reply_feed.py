"""Text of replies for a request with ``stream``, while they are being sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollgym.serve.dialects.base import Delta, StreamHead
from rollgym.serve.partial_reply import PartialReply


class ReplyFeed:
    """Passes text from a session, which samples replies, to the response that sends them."""

    def __init__(self) -> None:
        self.head: StreamHead | None = None
        """Set before the first token is sampled."""
        self.changed = asyncio.Event()
        """Set when there is something to `take`; others may set it too."""
        self._partial: dict[int, PartialReply] = {}
        self._taken: dict[int, tuple[str, str]] = {}

    def begin(self, head: StreamHead) -> None:
        """Record what is known before the first token."""
        self.head = head

    def follow(self, index: int, partial: PartialReply) -> Callable[[int], None]:
        """Follow the reply with this index; returns the function that takes its tokens."""
        self._partial[index], self._taken[index] = partial, ("", "")

        def on_token(token_id: int) -> None:
            partial.add(token_id)
            self.changed.set()

        return on_token

    def take(self) -> list[Delta]:
        """Return what is certain now and was not yet taken, and wait for changes from here on."""
        self.changed.clear()
        deltas = []
        for index, partial in self._partial.items():
            reasoning, text = partial.certain
            old_reasoning, old_text = self._taken[index]
            # Bytes that turn out to be invalid may change the characters before them: then nothing is added.
            if not reasoning.startswith(old_reasoning) or not text.startswith(old_text):
                continue
            self._taken[index] = reasoning, text
            delta = Delta(index=index, reasoning=reasoning[len(old_reasoning) :], text=text[len(old_text) :])
            if delta.reasoning or delta.text:
                deltas.append(delta)
        return deltas
