"""What a chat template does, found out by trying it on made-up conversations.

Nothing is read in the template's source: only what it writes counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from rollgym.chat.codec import Codec
from rollgym.errors import UsageError

Message = dict[str, str]
Apply = Callable[..., str]
"""Renders messages as text: ``apply(messages, generation=True)``."""

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
    """Something in the past that the template changes when the conversation goes on."""

    what: str
    difference: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """How a template puts a conversation together."""

    end_of_turn: str
    """The token that closes a reply; empty where the template writes none."""
    end_of_turn_id: int | None
    stop_ids: tuple[int, ...]
    """What ends a reply: the end-of-turn token, and the tokenizer's end of text."""
    separator: str
    """What stands between the end of a reply and the next message."""
    generation_prompt: str
    lead: str
    """What the template writes before a reply that the generation prompt does not hold, such as a space."""
    tail: str
    """What the template writes between a reply and its end-of-turn token: mostly nothing."""
    system_role: bool
    """False where the template knows no system message; its text then leads the first user message."""
    marked: bool
    """Whether a control token stands between what is observed and the reply: text cannot imitate that."""
    written: str
    """All that the template itself wrote in the trials."""
    rewrites: tuple[Rewrite, ...]

    @property
    def always_rewrites(self) -> bool:
        """True where even plain replies are changed later, so that every turn is a row of its own."""
        return any(rewrite.what == "a plain reply" for rewrite in self.rewrites)


def difference(expected: str, found: str) -> str:
    """The first place where two texts differ, with what stands around it."""
    place = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if place is None:
        if len(expected) == len(found):
            return "no difference"
        place = min(len(expected), len(found))
    start = max(0, place - _CONTEXT)
    dots = "…" if start else ""
    sides = [f"{dots}{text[start : place + _CONTEXT]!r}" for text in (expected, found)]
    return f"at character {place}: expected {sides[0]}, found {sides[1]}"


def examine(apply: Apply, codec: Codec) -> Facts:
    """Try a template out; a `UsageError` says why it cannot be used."""
    opening, whole = apply(_talk(1)), apply(_talk(2))
    system_role = _has_system_role(apply)
    systems = (False, True) if system_role else (False,)
    for system in systems:
        _check_repeats(apply, _talk(2, system))
    _check_order(opening, (_FIRST,))
    _check_order(whole, (_FIRST, _REPLY, _SECOND))
    lead = whole[len(opening) : whole.index(_REPLY)] if whole.startswith(opening) else ""
    tail, end, separator = _closing(apply, whole, codec)
    end_id = codec.added.get(end)
    return Facts(
        end_of_turn=end,
        end_of_turn_id=end_id,
        stop_ids=tuple(dict.fromkeys([*([] if end_id is None else [end_id]), *codec.eos_ids])),
        separator=separator,
        generation_prompt=_generation_prompt(apply, opening, codec),
        lead=lead,
        tail=tail,
        system_role=system_role,
        marked=_holds_token(whole[whole.index(_FIRST) : whole.index(_REPLY)], codec),
        written="\0".join(_without_words(apply(_talk(2, system))) for system in systems),
        rewrites=tuple(_rewrites(apply, systems, lead, tail)),
    )


def _talk(turns: int, system: bool = False, reply: str = _REPLY) -> list[Message]:
    talk = [{"role": "system", "content": _SYSTEM}] if system else []
    talk.append({"role": "user", "content": _FIRST})
    if turns > 1:
        talk += [{"role": "assistant", "content": reply}, {"role": "user", "content": _SECOND}]
    return talk


def _check_repeats(apply: Apply, talk: list[Message]) -> None:
    first = apply(talk)
    for _ in range(_REPEATS):
        again = apply(talk)
        if again != first:
            raise UsageError(
                "The chat template does not write the same text twice for the same messages "
                f"({difference(first, again)})."
            )
    dated = [apply(talk, now=now) for now in _TIMES]
    if dated[0] != dated[1]:
        raise UsageError(
            "The chat template writes today's date, so the same episode would differ from day to day "
            f"({difference(*dated)}). Give it a fixed one: date=YYYY-MM-DD."
        )


def _check_order(text: str, words: tuple[str, ...]) -> None:
    places = [text.find(word) for word in words]
    once = all(text.count(word) == 1 for word in words)
    if not once or places != sorted(places):
        wanted = " ".join(words)
        found = [word for _, word in sorted((i, w) for w in words for i in _all_places(text, w))]
        raise UsageError(
            "The chat template does not write each message once and in order, so a conversation cannot be "
            f"continued: expected {wanted!r}, found {' '.join(found)!r} in {text!r}."
        )


def _all_places(text: str, word: str) -> list[int]:
    return [i for i in range(len(text)) if text.startswith(word, i)]


def _closing(apply: Apply, whole: str, codec: Codec) -> tuple[str, str, str]:
    """What follows a reply, at the end as before another message: white space, end-of-turn, separator."""
    between = whole[whole.index(_REPLY) + len(_REPLY) : whole.index(_SECOND)]
    try:
        text = apply(_talk(2)[:2], generation=False)
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


def _holds_token(text: str, codec: Codec) -> bool:
    return any(token.strip() and token in text for token in codec.added)


def _generation_prompt(apply: Apply, opening: str, codec: Codec) -> str:
    closed = apply(_talk(1), generation=False)
    for token in codec.added:
        if codec.added[token] in codec.eos_ids and not opening.startswith(closed):
            closed = closed.removesuffix(token)
    return opening[len(closed) :] if opening.startswith(closed) else ""


def _has_system_role(apply: Apply) -> bool:
    try:
        text = apply(_talk(2, system=True))
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
        for what, reply in _REPLIES.items():
            expected = apply(_talk(1, system)) + lead + reply + tail
            text = apply(_talk(2, system, reply))
            if what in seen or text.startswith(expected):
                continue
            seen.add(what)
            plain = reply == _REPLY
            name = "the system message" if plain and system else what
            yield Rewrite(what=name, difference=difference(expected, text))
            if plain:
                return  # the other trials would find the same again
