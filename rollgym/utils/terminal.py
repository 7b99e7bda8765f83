"""Safe terminal output: control characters of files, environments, agents and servers are escaped.

Control characters can make a terminal hide lines, rewrite its contents, change its title or type. So every
command prints through `guarded` streams, and only `SafeConsole` writes colors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

_KEPT = "\n\t"
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
"""C0 (with ESC), DEL and C1, which has one-character forms of escape sequences."""
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Marks that reorder the text around them."""
_SHOWN = {code: f"\\u{code:04x}" for code in (*_CONTROLS, *_DIRECTIONS) if chr(code) not in _KEPT}


def printable(text: str) -> str:
    r"""Return text with every control character escaped as in JSON: ESC becomes ``\u001b``.

    Newlines and tabs stay. JSON stays JSON with the same meaning.

    Example:
        >>> printable("\x1b[2Jgone")
        '\\u001b[2Jgone'
    """
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").translate(_SHOWN)


class SafeStream:
    """A text stream that escapes control characters. Rich finds the stream below and guards it itself."""

    def __init__(self, stream: IO[str]) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write text with control characters escaped."""
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write pieces of text with control characters escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # bytes would bypass the guard
            raise AttributeError(name)
        return getattr(self.rich_proxied_file, name)


def raw(stream: Any) -> Any:
    """Return the stream below a guarded one, for a console that guards its text itself."""
    while isinstance(stream, SafeStream):
        stream = stream.rich_proxied_file
    return stream


@contextmanager
def guarded() -> Iterator[None]:
    """Guard stdout and stderr within the block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(IO[str], SafeStream(raw(stream))) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
