"""Text to search terms, as Lucene's English analysis does it.

Words by Unicode's word boundary rules (UAX #29, emoji sequences are words too), then: possessive ``'s`` off,
lower case, stop words out, Porter's stemmer. Both search engines use it, for documents and for queries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

from rollgym.core.errors import MissingExtra
from rollgym.envs.webshop.search.porter import stem

LONGEST = 255
"""A longer word is cut into pieces of this many UTF-16 units."""

_STOP = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with
"""
STOP_WORDS = frozenset(_STOP.split())

_POSSESSIVE = ("'s", "'S", "\u2019s", "\u2019S", "\uff07s", "\uff07S")
_CACHED_LENGTH = 64
_WINDOW = 4 * LONGEST

# Unicode 14's pictures beside the emoji: later versions took some of them out of the property.
_PICTURES = """
2388-2388 2600-2605 2607-2612 2614-2685 2690-2705 2708-2712 2763-2767 1F000-1F0FF 1F10D-1F10F 1F12F-1F12F
1F16C-1F171 1F1AD-1F1E5 1F201-1F20F 1F23C-1F23F 1F249-1F3FA 1F400-1F53D 1F546-1F64F 1F680-1F6FF 1F774-1F77F
1F7D5-1F7FF 1F80C-1F80F 1F848-1F84F 1F85A-1F85F 1F888-1F88F 1F8AE-1F8FF 1F90C-1F93A 1F93C-1F945 1F947-1FAFF
1FC00-1FFFD
"""

_ASCII_WORD = re.compile(
    r"""_{0,254}+[A-Za-z0-9](?:[A-Za-z0-9_]+|(?<=[A-Za-z])[:.'](?=[A-Za-z])|(?<=[0-9])[,;.'](?=[0-9]))*"""
)


def tokens(text: str) -> list[str]:
    """The search terms of a text, in order, with repeats."""
    # No word spans white space, so the pieces between it can be analysed, and remembered, one by one.
    return [token for piece in text.split() for token in _terms(piece)]


def _terms(piece: str) -> tuple[str, ...]:
    return _cached(piece) if len(piece) <= _CACHED_LENGTH else _analyse(piece)


def _analyse(piece: str) -> tuple[str, ...]:
    words = (_lower(word[:-2] if word.endswith(_POSSESSIVE) else word) for word in _words(piece))
    return tuple(stem(word) for word in words if word not in STOP_WORDS)


_cached = lru_cache(maxsize=1 << 16)(_analyse)


def _lower(word: str) -> str:
    """Lower case character by character: one for one, regardless of context."""
    if word.isascii():
        return word.lower()
    return "".join("i" if char == "\u0130" else char.lower() for char in word)


def _words(piece: str) -> Iterator[str]:
    """The words of a text, none longer than `LONGEST`, in linear time for any text."""
    find = _ASCII_WORD.search if piece.isascii() else _unicode_word().search
    position = 0
    while position < len(piece):
        match = find(piece, position, position + _WINDOW)
        if match is None:
            position += _WINDOW - LONGEST
            continue
        start, end = match.span()
        if start > position + _WINDOW - 2 * LONGEST:
            position = start  # Too near to the end of the window to be seen whole: look again from here.
            continue
        if end - start > LONGEST // 2 and (limit := _limit(piece, start)) < end:
            # Lucene, too, reads through a window: it takes the longest word that fits into it.
            match = find(piece, start, limit)
            end = match.end() if match else limit
        yield piece[start:end]
        position = end


def _limit(piece: str, start: int) -> int:
    """Return the position that `LONGEST` UTF-16 units reach from ``start``."""
    units_left = LONGEST
    for position in range(start, len(piece)):
        units_left -= 1 + (piece[position] > "\uffff")
        if units_left < 0:
            return position
    return len(piece)


@cache
def _unicode_word() -> Any:
    """The pattern of a word in any writing system."""
    try:
        import regex  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtra("Shop search", "webshop") from error
    modifier, joiner = r"\U0001F3FB-\U0001F3FF", r"\u200D"
    joiners = joiner + "{0,254}+"
    # Skin tones count as marks in newer Unicode; in Lucene's tables they do not.
    marks = rf"[[\p{{WB=Format}}\p{{WB=Extend}}{joiner}]--[{modifier}]]*+"
    marks_only = rf"[[\p{{WB=Format}}\p{{WB=Extend}}{joiner}]--[{modifier}\uFE0E\uFE0F]]*+"
    letter = r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}]"
    digit = r"[\p{WB=Numeric}\uFF10-\uFF19]"
    quote = r"\p{WB=Single_Quote}"
    hebrew = r"\p{WB=Hebrew_Letter}"
    kana = rf"(?:\p{{WB=Katakana}}{marks})++"
    low_line = rf"(?:\p{{WB=ExtendNumLet}}{marks})"

    def after(kind: str) -> str:
        return rf"(?<={kind}{marks[:-1]})"

    inner = "|".join(
        (
            rf"{letter}{marks}",
            rf"{digit}{marks}",
            rf"{after(letter)}[\p{{WB=MidLetter}}\p{{WB=MidNumLet}}{quote}]{marks}(?={letter})",
            rf"{after(digit)}[\p{{WB=MidNum}}\p{{WB=MidNumLet}}{quote}]{marks}(?={digit})",
            rf"{after(hebrew)}{quote}{marks}",
            rf"{after(hebrew)}\p{{WB=Double_Quote}}{marks}(?={hebrew})",
        )
    )
    run = rf"(?:{kana}|(?={letter}|{digit})(?:{inner})++)"
    word = rf"(?!\p{{WB=ExtendNumLet}}{{255}}){low_line}{{0,254}}+{run}(?:{low_line}++{run})*+{low_line}*+"
    spans = (span.split("-") for span in _PICTURES.split())
    pictures = "".join(f"{chr(int(first, 16))}-{chr(int(last, 16))}" for first, last in spans)
    picture = rf"{joiners}[{pictures}[\p{{Emoji}}--[0-9#*\U0001F1E6-\U0001F1FF{modifier}]]]"
    toned = rf"(?:{joiners}\p{{Emoji_Modifier_Base}}{marks_only})?[{modifier}]{marks_only}"
    emoji = rf"(?:{toned}|{picture}{marks_only}\uFE0F?)"
    # The marks of one picture may already have taken the joiner to the next.
    sequence = rf"{emoji}(?:[\U000E0020-\U000E007E]+\U000E007F|(?:(?:(?<={joiner})|{joiner}){emoji})*)"
    keycap = rf"[0-9#*](?:(?!\u20E3){marks_only[:-2]})*+\uFE0F?\u20E3{marks_only}"
    flag = rf"(?:\p{{WB=Regional_Indicator}}{marks}){{2}}"
    asian = rf"(?:\p{{LB=Complex_Context}}{marks})++|\p{{Script=Han}}{marks}|\p{{Script=Hiragana}}{marks}"
    return regex.compile(f"(?V1){word}|{sequence}|{keycap}|{flag}|{asian}")
