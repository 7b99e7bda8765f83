"""The tokenizer protocol of conversations, and loading a tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
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
        conversation: list[dict[str, str]],
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
