"""The part of an unfinished reply that a client may see already.

Whether a text is content, reasoning or a tool call can depend on what follows it: a malformed call makes text
of the calls before it. `PartialReply` releases a text only when it stays the same whatever follows; the rest
waits for the end of the reply.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from rollgym.chat import ChatTemplate
from rollgym.chat.tokenizer import Codec
from rollgym.chat.tool_formats import before_markers, split_unfinished, unfinished_channels

MAX_PENDING = 64
"""Tokens without a complete character after which the text is held back until the end."""
_INCOMPLETE = "\ufffd"
"""Decoded in place of a character of which some bytes are missing."""


class TokenText:
    """The text of a growing list of ids, in complete characters."""

    def __init__(self, codec: Codec, *, special: bool) -> None:
        self._codec, self._special = codec, special
        self._ids: list[int] = []
        # Only the last ids are decoded: those that may still change, and some before them as context.
        self._start = self._done = 0
        self._context = ""
        self.text = ""

    def add(self, token_id: int) -> None:
        """Append a token."""
        self._ids.append(token_id)
        if len(self._ids) - self._done > MAX_PENDING:
            return
        text = self._codec.decode(self._ids[self._start :], special=self._special)
        if text.endswith(_INCOMPLETE) or not text.startswith(self._context):
            return
        self.text += text[len(self._context) :]
        # A tokenizer may drop the space at the start of a text: the context must show something.
        added = self._codec.decode(self._ids[self._done :], special=self._special)
        if added:
            self._start = self._done
        self._context, self._done = added or text, len(self._ids)

    def copy(self, *, special: bool) -> TokenText:
        """Return an independent copy that shows special tokens or not, if it has none so far."""
        other = copy.copy(self)
        other._ids, other._special = list(self._ids), special
        return other


class PartialReply:
    """A reply while it is being sampled.

    Args:
        template: The model's chat template.
        tools: Whether the reply may call tools.
        stops: Stop strings: none of them is ever shown.
        begun: Ids with which the reply starts, though they are not sampled.
        stop_ids: Tokens that end the reply and are not part of its text.
        calls_as_text: Whether calls are shown as text.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        tools: bool,
        stops: Sequence[str] = (),
        begun: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        calls_as_text: bool = False,
    ) -> None:
        self._format, self._tools, self._stops = template.tools.format, tools, tuple(stops)
        self._opened, self._as_text = template.opens_reasoning, calls_as_text
        self._stop_ids = frozenset(stop_ids)
        self._special_ids = frozenset(template.codec.added[token] for token in template.codec.special)
        self._raw = self._plain = TokenText(template.codec, special=True)
        """The text with special tokens, and without: the same until there is one."""
        self._ended = False
        """Whether a stop string was sampled: what follows is not a part of the reply."""
        self._known, self._parts_of = ("", ""), 0
        """The last result of `certain`, and the length of the text then."""
        for token_id in begun:
            self._append(token_id)
        self._begun = len(self._plain.text)
        self._overlap = max((len(stop) for stop in self._stops), default=1) - 1

    def add(self, token_id: int) -> None:
        """Append a sampled token."""
        if self._ended or token_id in self._stop_ids:
            return
        start = max(self._begun, len(self._plain.text) - self._overlap)
        self._append(token_id)
        self._ended = any(self._plain.text.find(stop, start) >= 0 for stop in self._stops)

    def _append(self, token_id: int) -> None:
        if self._raw is self._plain and token_id in self._special_ids:
            self._plain = self._raw.copy(special=False)
        if self._raw is not self._plain:
            self._plain.add(token_id)
        self._raw.add(token_id)

    @property
    def certain(self) -> tuple[str, str]:
        """Reasoning and content so far: each is the start of that of the finished reply."""
        length = len(self._raw.text)
        # All of the text is searched: more seldom, the longer it is.
        if length - self._parts_of > length >> 8 or not self._parts_of:
            reasoning, content = self._parts()
            self._known = self._before_stop(reasoning), self._before_stop(content).rstrip()
            self._parts_of = length
        return self._known

    def _parts(self) -> tuple[str, str]:
        raw, plain = self._raw.text, self._plain.text
        if self._format.channels:
            return ("" if self._as_text and self._tools else unfinished_channels(raw)), ""
        parts = split_unfinished(raw, self._opened)
        if parts is None:
            return "", ""
        reasoning, rest = parts
        if rest is not raw:
            return reasoning, self._outside_calls(rest).strip()
        if not self._tools:
            return "", plain
        # The text is all that was sampled, or stripped, with special tokens, beside calls: what both show.
        if raw[:1].isspace():
            return "", ""
        same = next((i for i, (a, b) in enumerate(zip(raw, plain, strict=False)) if a != b), len(plain))
        return "", self._outside_calls(raw)[:same]

    def _outside_calls(self, text: str) -> str:
        return text[: self._format.call_start(text)] if self._tools else text

    def _before_stop(self, text: str) -> str:
        return text[: before_markers(text, self._stops)]
