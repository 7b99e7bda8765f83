"""The tokenizer protocol of conversations, and loading a tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

from rollgym.core.errors import MissingExtra, UsageError, one_line

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""The folder of a tokenizer has at least one of these."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that conversations use."""

    @property
    def eos_token_id(self) -> Any:
        """The id or ids that end a text, or ``None``."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """The tokens beyond the vocabulary proper: id to a value with ``content`` and ``special``."""

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> Any:
        """Return the conversation as text (``tokenize`` is always false here)."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return text as ids; control tokens that are spelled out in the text are read as such."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        """Return ids as text."""


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Load the tokenizer of a folder in Hugging Face format, without downloads or remote code."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"There is no folder {folder}: name one with a model in Hugging Face format.")
    if not any((folder / name).is_file() for name in _FILES):
        raise UsageError(f"The folder {folder} does not hold a tokenizer: tokenizer.json is missing.")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtra("Reading a model's tokenizer", "train") from None
    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = one_line(error)
        shown = reason if len(reason) <= 200 else f"{reason[:200]}…"
        raise UsageError(f"The tokenizer in {folder} cannot be loaded ({shown}).") from None
    # The engine checks the length of whole conversations; this limit would only cause warnings.
    loaded.model_max_length = sys.maxsize
    return cast(Tokenizer, loaded)


MIDDLE = "\n"
"""Context of a piece where the text before it is unknown."""
CACHE_SIZE, MAX_CACHED_CHARS = 20_000, 2_000
"""Number of pieces whose ids are cached, and their maximum length."""
_NEVER_SEEN = chr(0x10FFFD)
"""A character that is in no vocabulary."""


class Codec:
    """Encodes and decodes pieces of a conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Games show the same positions again and again, and tokenizing dominates the cost of a turn.
        self._cached = lru_cache(CACHE_SIZE)(self._tokenize)
        added = tokenizer.added_tokens_decoder.items()
        self.added: dict[str, int] = {str(token.content): int(number) for number, token in added}
        """Every added token (matched in text before anything else), with its id."""
        self.special = frozenset(str(token.content) for _, token in added if token.special)
        special_ids = {self.added[token] for token in self.special}
        self.unknown = special_ids.intersection(self._raw(_NEVER_SEEN))
        """The ids that stand for unknown characters, if any."""
        self._bare = False
        """True where the tokenizer adds nothing before a text, so that the context does not matter."""
        self._bare = self._after(MIDDLE, "a") == self._raw("a")
        eos = tokenizer.eos_token_id
        self.eos_ids: tuple[int, ...] = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)

    def encode(self, pieces: Iterable[str], before: str = "") -> list[int]:
        """Return the ids of pieces that are tokenized separately.

        ``before`` is the text before the first piece; empty at the start of a text.
        """
        ids: list[int] = []
        for piece in pieces:
            ids += self._raw(piece) if not before else self._after(before, piece)
            before = MIDDLE
        return ids

    def decode(self, ids: Sequence[int], *, after: int | None = None, special: bool = True) -> str:
        """Return the text of ids that follow the id ``after``, with or without special tokens."""
        text = self._text(ids, special)
        if after is None or self._bare:
            return text
        # Such a tokenizer drops a space at the start of a text, but not in the middle.
        head, both = self._text([after], special), self._text([after, *ids], special)
        return both[len(head) :] if both.startswith(head) else text

    def _text(self, ids: Sequence[int], special: bool) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )

    def _raw(self, text: str) -> list[int]:
        if not text:
            return []
        return list(self._cached(text) if len(text) <= MAX_CACHED_CHARS else self._tokenize(text))

    def _tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _after(self, before: str, text: str) -> list[int]:
        if before == MIDDLE and self._bare:
            return self._raw(text)
        head, both = self._raw(before), self._raw(before + text)
        return both[len(head) :] if both[: len(head)] == head else self._raw(text)
