"""A rich console for untrusted text. Separate from `rollgym.utils.terminal`: rich is slow to import."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.errors import MarkupError
from rich.segment import Segment
from rich.text import Text

from rollgym.utils.terminal import printable, raw


class SafeConsole(Console):
    """A rich console that escapes control characters in the text and drops links."""

    @property
    def file(self) -> IO[str]:
        """The stream below a `SafeStream`, which would escape rich's own codes."""
        stream: IO[str] = raw(super().file)
        return stream

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with control characters escaped."""
        for text, style, control in super().render(renderable, options):
            if control:
                yield Segment(text, style, control)
            else:
                plain = style.update_link(None) if style is not None and style.link else style
                yield Segment(printable(text), plain)

    def render_str(self, text: str, **how: Any) -> Text:
        """Render text with rich's markup; as plain text where brackets only look like markup."""
        try:
            return super().render_str(text, **how)
        except MarkupError:
            return super().render_str(text, **{**how, "markup": False})
