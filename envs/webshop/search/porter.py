"""Porter's stemmer, with the two later additions of its author that Lucene's has (``bli`` and ``logi``).

Any character that is not one of ``aeiouy`` counts as a consonant, digits and other alphabets included.
"""

from __future__ import annotations

_VOWELS = "aeiou"

_STEP_2 = {
    "a": (("ational", "ate"), ("tional", "tion")),
    "c": (("enci", "ence"), ("anci", "ance")),
    "e": (("izer", "ize"),),
    "l": (("bli", "ble"), ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous")),
    "o": (("ization", "ize"), ("ation", "ate"), ("ator", "ate")),
    "s": (("alism", "al"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous")),
    "t": (("aliti", "al"), ("iviti", "ive"), ("biliti", "ble")),
    "g": (("logi", "log"),),
}
_STEP_3 = {
    "e": (("icate", "ic"), ("ative", ""), ("alize", "al")),
    "i": (("iciti", "ic"),),
    "l": (("ical", "ic"), ("ful", "")),
    "s": (("ness", ""),),
}
_STEP_4 = {
    "a": ("al",),
    "c": ("ance", "ence"),
    "e": ("er",),
    "i": ("ic",),
    "l": ("able", "ible"),
    "n": ("ant", "ement", "ment", "ent"),
    "o": ("sion", "tion", "ou"),
    "s": ("ism",),
    "t": ("ate", "iti"),
    "u": ("ous",),
    "v": ("ive",),
    "z": ("ize",),
}
_ENDINGS = (
    *("s", "ed", "ing", "y", "e", "ll"),
    *(suffix for table in (_STEP_2, _STEP_3) for rules in table.values() for suffix, _ in rules),
    *(suffix for suffixes in _STEP_4.values() for suffix in suffixes),
)
"""A word without one of these endings is its own stem."""


def stem(word: str) -> str:
    """The stem of a lower-case word; words of one or two letters (UTF-16 units) stay as they are."""
    if not word.endswith(_ENDINGS) or (len(word) <= 2 and max(word) <= "\uffff"):
        return word
    word = _y_to_i(_past_and_gerund(_plural(word)))
    word = _replace(word, _STEP_2, by_last=False)
    word = _replace(word, _STEP_3, by_last=True)
    return _final_e_and_l(_strip(word))


def _shape(word: str) -> str:
    """One letter for each character: ``v`` for a vowel, ``c`` for a consonant."""
    shape = ""
    for letter in word:
        vowel = letter in _VOWELS or (letter == "y" and shape.endswith("c"))
        shape += "v" if vowel else "c"
    return shape


def _measure(word: str) -> int:
    """How often a consonant follows a vowel."""
    return _shape(word).count("vc")


def _double_consonant(word: str) -> bool:
    """Ends in the same consonant twice."""
    return len(word) > 1 and word[-1] == word[-2] and _shape(word)[-1] == "c"


def _short(word: str) -> bool:
    """Ends in consonant, vowel, consonant, the last not w, x or y (``hop``, not ``snow``)."""
    return _shape(word).endswith("cvc") and word[-1] not in "wxy"


def _plural(word: str) -> str:
    if word.endswith(("sses", "ies")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _past_and_gerund(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) else word
    base = word[:-2] if word.endswith("ed") else word[:-3] if word.endswith("ing") else None
    if base is None or "v" not in _shape(base):
        return word
    if base.endswith(("at", "bl", "iz")):
        return base + "e"
    if _double_consonant(base):
        return base if base[-1] in "lsz" else base[:-1]
    return base + "e" if _measure(base) == 1 and _short(base) else base


def _y_to_i(word: str) -> str:
    return word[:-1] + "i" if word.endswith("y") and "v" in _shape(word[:-1]) else word


def _replace(word: str, table: dict[str, tuple[tuple[str, str], ...]], *, by_last: bool) -> str:
    """Swap the first suffix that fits, where enough of the word is left before it."""
    for suffix, new in table.get(word[-1:] if by_last else word[-2:-1], ()):
        if word.endswith(suffix):
            base = word[: -len(suffix)]
            return base + new if _measure(base) else word
    return word


def _strip(word: str) -> str:
    """Take off the first suffix that fits, where two syllables are left before it."""
    for suffix in _STEP_4.get(word[-2:-1], ()):
        if word.endswith(suffix):
            # The s or t before "ion" is part of what must be there, not of what goes.
            base = word[:-3] if suffix.endswith("ion") else word[: -len(suffix)]
            return base if _measure(base) > 1 else word
    return word


def _final_e_and_l(word: str) -> str:
    measure = _measure(word)
    if word.endswith("e") and (measure > 1 or (measure == 1 and not _short(word[:-1]))):
        word = word[:-1]
    return word[:-1] if word.endswith("ll") and measure > 1 else word
