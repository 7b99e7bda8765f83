"""Properties of a chat template, found by rendering made-up conversations.

The source of the template is not read: only its output counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rollgym.chat.tokenizer import Codec
from rollgym.core.errors import UsageError

Message = dict[str, str]
TemplateMessage = dict[str, Any]
"""A message as chat templates take it: ``role``, ``content``, and with tools ``tool_calls`` and more."""
Apply = Callable[..., str]
"""Renders messages as text: ``apply(messages, generation=True, tools=None)``."""

_SYSTEM, _FIRST, _REPLY, _SECOND = "qzsystem", "qzfirst", "qzreply", "qzsecond"
_REPLIES = {
    "a plain reply": _REPLY,
    "reasoning in a reply": f"<think>\nqzthought\n</think>\n\n{_REPLY}",
    "white space around a reply": f" {_REPLY}\n",
}
_REPEATS = 8
_CONTEXT = 24
_TIMES = (datetime(2001, 2, 3, 4, 5, 6, 7), datetime(2013, 12, 11, 22, 33, 44, 55))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Something in earlier messages that the template changes when the conversation continues."""

    what: str
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """How a template renders a conversation."""

    end_of_turn: str
    """The token that ends a reply; empty where the template writes none."""
    end_of_turn_id: int | None
    stop_ids: tuple[int, ...]
    """Tokens that end a reply: the end-of-turn token, and the tokenizer's end of text."""
    separator: str
    """The text between the end of a reply and the next message."""
    generation_prompt: str
    lead: str
    """Text before a reply that is not part of the generation prompt, such as a space."""
    tail: str
    """Text between a reply and its end-of-turn token: usually empty."""
    system_role: bool
    """False where the template has no system message; its text then starts the first user message."""
    marked: bool
    """True where a control token separates observation and reply, which text cannot imitate."""
    written: str
    """All text that the template itself wrote in the trials."""
    rewrites: tuple[Rewrite, ...]

    @property
    def always_rewrites(self) -> bool:
        """True where even plain replies are changed later, so that every turn starts a new row."""
        return any(rewrite.what == "a plain reply" for rewrite in self.rewrites)


def difference(expected: str, actual: str) -> str:
    """Return the first position at which two texts differ, with its context."""
    position = next((i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), None)
    if position is None:
        if len(expected) == len(actual):
            return "no difference"
        position = min(len(expected), len(actual))
    start = max(0, position - _CONTEXT)
    dots = "…" if start else ""
    sides = [f"{dots}{text[start : position + _CONTEXT]!r}" for text in (expected, actual)]
    return f"at character {position}: expected {sides[0]}, found {sides[1]}"


def probe_template(apply: Apply, codec: Codec) -> TemplateFacts:
    """Probe a template; raise a `UsageError` where conversations cannot be continued with it."""
    opening, whole = apply(_messages(1)), apply(_messages(2))
    system_role = _has_system_role(apply)
    systems = (False, True) if system_role else (False,)
    for system in systems:
        _check_repeats(apply, _messages(2, system))
    _check_order(opening, (_FIRST,))
    _check_order(whole, (_FIRST, _REPLY, _SECOND))
    lead = whole[len(opening) : whole.index(_REPLY)] if whole.startswith(opening) else ""
    tail, end, separator = _closing(apply, whole, codec)
    end_id = codec.added.get(end)
    between = whole[whole.index(_FIRST) : whole.index(_REPLY)]
    return TemplateFacts(
        end_of_turn=end,
        end_of_turn_id=end_id,
        stop_ids=tuple(dict.fromkeys([*([] if end_id is None else [end_id]), *codec.eos_ids])),
        separator=separator,
        generation_prompt=_generation_prompt(apply, opening, codec),
        lead=lead,
        tail=tail,
        system_role=system_role,
        marked=any(token.strip() and token in between for token in codec.added),
        written="\0".join(_without_words(apply(_messages(2, system))) for system in systems),
        rewrites=tuple(_rewrites(apply, systems, lead, tail)),
    )


def _messages(turns: int, system: bool = False, reply: str = _REPLY) -> list[Message]:
    messages = [{"role": "system", "content": _SYSTEM}] if system else []
    messages.append({"role": "user", "content": _FIRST})
    if turns > 1:
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": _SECOND}]
    return messages


def _check_repeats(apply: Apply, messages: list[Message]) -> None:
    first = apply(messages)
    for _ in range(_REPEATS):
        again = apply(messages)
        if again != first:
            raise UsageError(
                "The chat template does not write the same text twice for the same messages "
                f"({difference(first, again)})."
            )
    dated = [apply(messages, now=now) for now in _TIMES]
    if dated[0] != dated[1]:
        raise UsageError(
            "The chat template writes today's date, so the same episode would differ from day to day "
            f"({difference(*dated)}). Set a fixed date: date=YYYY-MM-DD."
        )


def _check_order(text: str, words: tuple[str, ...]) -> None:
    positions = [text.find(word) for word in words]
    once = all(text.count(word) == 1 for word in words)
    if not once or positions != sorted(positions):
        expected = " ".join(words)
        starts = [(i, word) for word in words for i in range(len(text)) if text.startswith(word, i)]
        written = [word for _, word in sorted(starts)]
        raise UsageError(
            "The chat template does not write each message once and in order, so a conversation cannot be "
            f"continued: expected {expected!r}, found {' '.join(written)!r} in {text!r}."
        )


def _closing(apply: Apply, whole: str, codec: Codec) -> tuple[str, str, str]:
    """Return the white space, end-of-turn token and separator that follow a reply."""
    between = whole[whole.index(_REPLY) + len(_REPLY) : whole.index(_SECOND)]
    try:
        text = apply(_messages(2)[:2], generation=False)
    except UsageError:
        return "", "", ""
    closing = text.rpartition(_REPLY)[2]
    bare = closing.lstrip()
    tail = closing[: len(closing) - len(bare)]
    tokens = [token for token in codec.added if token.strip() and bare.startswith(token)]
    end = max(tokens, key=len, default="")
    if not between.startswith(tail + end):
        return "", "", ""
    rest = bare[len(end) :]
    if not between.startswith(closing):
        # The end of a text may be marked as well, but white space before that belongs to the turn.
        rest = rest[: len(rest) - len(rest.lstrip())]
    return (tail, end, rest) if end else ("", "", tail + rest)


def _generation_prompt(apply: Apply, opening: str, codec: Codec) -> str:
    closed = apply(_messages(1), generation=False)
    for token in codec.added:
        if codec.added[token] in codec.eos_ids and not opening.startswith(closed):
            closed = closed.removesuffix(token)
    return opening[len(closed) :] if opening.startswith(closed) else ""


def _has_system_role(apply: Apply) -> bool:
    try:
        text = apply(_messages(2, system=True))
    except UsageError:
        return False
    return text.count(_SYSTEM) == 1


def _without_words(text: str) -> str:
    for word in (_SYSTEM, _FIRST, _REPLY, _SECOND):
        text = text.replace(word, "\0")
    return text


def _rewrites(apply: Apply, systems: tuple[bool, ...], lead: str, tail: str) -> Iterator[Rewrite]:
    seen: set[str] = set()
    for system in systems:
        for kind, reply in _REPLIES.items():
            expected = apply(_messages(1, system)) + lead + reply + tail
            text = apply(_messages(2, system, reply))
            if kind in seen or text.startswith(expected):
                continue
            seen.add(kind)
            plain = reply == _REPLY
            name = "the system message" if plain and system else kind
            yield Rewrite(what=name, difference=difference(expected, text))
            if plain:
                return  # the other trials would find the same again
