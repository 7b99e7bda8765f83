"""Text to ids and back, piece by piece.

Text is tokenised as if it stood in the middle of a longer one: some tokenizers put a space before the start
of a text, and some control tokens swallow the white space after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from rollgym.chat.tokenizer import Tokenizer

MIDDLE = "\n"
"""What a piece is tokenised after, where nothing is known of what stands before it."""
REMEMBERED, LONGEST_REMEMBERED = 20_000, 2_000
"""How many pieces of text keep their ids, and up to which length."""
_NEVER_SEEN = chr(0x10FFFD)
"""A character that no vocabulary holds."""


class Codec:
    """Encodes and decodes pieces of a conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Games show the same positions again and again, and tokenising is most of what a turn costs here.
        self._known = lru_cache(REMEMBERED)(self._tokenise)
        added = tokenizer.added_tokens_decoder.items()
        self.added: dict[str, int] = {str(token.content): int(number) for number, token in added}
        """Every token that is matched in text before anything else, with its id."""
        self.special = frozenset(str(token.content) for _, token in added if token.special)
        special_ids = {self.added[token] for token in self.special}
        self.unknown = special_ids.intersection(self._raw(_NEVER_SEEN))
        """The id that stands for characters the tokenizer does not know, if it has one."""
        self._bare = False
        """Whether a text gets nothing put before its start, so that it matters not what it follows."""
        self._bare = self._after(MIDDLE, "a") == self._raw("a")
        eos = tokenizer.eos_token_id
        self.eos_ids: tuple[int, ...] = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)

    def encode(self, pieces: Iterable[str], before: str = "") -> list[int]:
        """The ids of pieces that are tokenised one by one.

        ``before`` is the text that the first piece follows, as far as it matters; nothing for the start of
        a text.
        """
        ids: list[int] = []
        for piece in pieces:
            ids += self._raw(piece) if not before else self._after(before, piece)
            before = MIDDLE
        return ids

    def decode(self, ids: Sequence[int], *, after: int | None = None, special: bool = True) -> str:
        """The text of ids that follow the id ``after``, with or without special tokens."""
        text = self._text(ids, special)
        if after is None or self._bare:
            return text
        # Such a tokenizer drops the first space of a text, but not one in the middle.
        head, both = self._text([after], special), self._text([after, *ids], special)
        return both[len(head) :] if both.startswith(head) else text

    def _text(self, ids: Sequence[int], special: bool) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )

    def _raw(self, text: str) -> list[int]:
        if not text:
            return []
        return list(self._known(text) if len(text) <= LONGEST_REMEMBERED else self._tokenise(text))

    def _tokenise(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _after(self, before: str, text: str) -> list[int]:
        if before == MIDDLE and self._bare:
            return self._raw(text)
        head, both = self._raw(before), self._raw(before + text)
        return both[len(head) :] if both[: len(head)] == head else self._raw(text)
