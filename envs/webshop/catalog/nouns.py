"""The nouns of a product's title, found once when a catalog is built.

spaCy's small English model finds them where it is installed, as in the original. Otherwise a few rules do:
titles are strings of names, so every word counts that is not a number, function word or adjective,
adverb or verb by its ending. Or a file lists them. The manifest of a shop records which tagger was used.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MODEL = "en_core_web_sm"
LIGHT = "light-1"

_FILE = Path(__file__).with_name("nouns.txt")
# A word in capitals is part of a name more often than not, so endings count only in lower case.
_ENDINGS = re.compile(r"(?:able|ible|ful|less|ous|ive|ish|ed|ly|est)$")
_EDGES = "()[]{}<>\"'“”‘’`,.;:!?*#$+-–—_|/\\~=^@™®©•…【】（）、，！"
_INSIDE = re.compile(
    r"(?<=[^\W_])[-–—/:,|+](?=[^\W\d_])|(?<=[a-z])\.(?=[A-Z])|[()\[\]{}\"“”【】、，|]|\.\.+|--+|—"
)
_POSSESSIVE = re.compile(r"['’]s?$", re.IGNORECASE)
_NUMBER = re.compile(
    r"[\d.,/%x×°\"'-]*\d[\d.,/%x×°\"'-]*$|\d[\d.,]*(?:k|g|gb|tb|mm|th|nd|rd|st|v)$", re.IGNORECASE
)

Tag = Callable[[str], tuple[str, ...]]


class Tagger:
    """Finds nouns by a file where the file has the product, by rules or by spaCy otherwise."""

    def __init__(
        self, given: Mapping[str, tuple[str, ...]] | None = None, tag: Tag | None = None, name: str = ""
    ) -> None:
        if tag is None:
            tag, name = best_tagger()
        self._given = given or {}
        self._tag = tag
        self.name = f"file, else {name}" if self._given else name
        """Name of the tagger for the manifest."""

    def __call__(self, asin: str, title: str) -> tuple[str, ...]:
        """The nouns of a title, lower case, in order, with repeats."""
        nouns = self._given.get(asin)
        return self._tag(title) if nouns is None else nouns


def best_tagger() -> tuple[Tag, str]:
    """Return spaCy's tagger if it and its model are installed, otherwise the light rules; and its name."""
    model = _spacy_model()
    if model is None:
        return light_nouns, LIGHT
    name = f"{MODEL} {model.meta.get('version', '')}".strip()
    return functools.partial(_spacy_nouns, model), name


def light_nouns(title: str) -> tuple[str, ...]:
    """Nouns by rules alone."""
    return tuple(word.lower() for word in words_of(title) if _is_noun(word))


def words_of(title: str) -> list[str]:
    """The words of a title, without the punctuation around them and the possessive ending."""
    rough = (part for chunk in title.split() for part in _INSIDE.split(chunk))
    stripped = (_POSSESSIVE.sub("", part.strip(_EDGES)) for part in rough)
    return [word for word in stripped if any(char.isalnum() for char in word)]


def _is_noun(word: str) -> bool:
    lower, lists = word.lower(), _word_lists()
    if lower in lists["function"] or lower in lists["verb"] or _NUMBER.match(word):
        return False
    if not word.islower():
        return True
    return lower not in lists["adjective"] and not (len(lower) > 4 and _ENDINGS.search(lower))


@functools.cache
def _word_lists() -> dict[str, frozenset[str]]:
    text = re.sub(r"^#.*$", "", _FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    parts = re.split(r"\[(\w+)\]", text)[1:]
    return {name: frozenset(words.split()) for name, words in zip(parts[::2], parts[1::2], strict=True)}


def _spacy_model() -> Any:
    try:
        import spacy  # type: ignore[import-not-found, unused-ignore]

        return spacy.load(MODEL, exclude=["parser", "ner", "lemmatizer"])
    except (ImportError, OSError):
        return None


def _spacy_nouns(model: Any, title: str) -> tuple[str, ...]:
    return tuple(token.text.lower() for token in model(title) if token.pos_ in ("NOUN", "PROPN"))
