"""The command line of a run, for its manifest and its page."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_SECRET = re.compile(r"(?i)([\w.-]*(?:key|token|secret|password)[\w.-]*=).+")
_LOGIN = re.compile(r"//[^/@\s]+@")
_NAMES_A_SETTING = re.compile(r"(?i)(tokens|token_|_env=|tokens_every|keep)")

_words: tuple[str, ...] | None = None


def note_command(words: Sequence[str] | None) -> None:
    """Set the arguments after ``rollgym``; ``None`` clears them."""
    global _words
    _words = None if words is None else tuple(words)


def command_line() -> str | None:
    """Return the command line without values that look like secrets; ``None`` outside a command."""
    if _words is None:
        return None
    return shlex.join(["rollgym", *map(_without_secrets, _words)])


def _without_secrets(word: str) -> str:
    if not _NAMES_A_SETTING.search(word.partition("=")[0] + "="):
        word = _SECRET.sub(r"\1***", word)
    return _LOGIN.sub("//***@", word)
